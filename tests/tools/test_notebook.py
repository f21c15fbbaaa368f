"""The notebook of ppo.py: made from the file, in the format of notebooks, and it trains what the file trains."""

import json
import re
import subprocess
import sys

from helpers.files import ROOT, header, script

NOTEBOOK = ROOT / "docs/notebooks/ppo.ipynb"
# As Jupyter runs it, one cell after the other, which it keeps in `In`; then the file with the same flags.
RUN = r"""
import json, runpy, sys
notebook, script = sys.argv[1:]
names, sys.argv = {"In": [""], "__name__": "__main__"}, [script, "--total-timesteps", "1024", "--save-model"]
for cell in json.load(open(notebook, encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        text = "".join(cell["source"]).replace("total_timesteps=50_000", "total_timesteps=1024")
        text = text.replace("def layer_init(", "def edited():\n    pass\n\n\ndef layer_init(")
        names["In"].append(text)
        exec("\n".join(line for line in text.split("\n") if not line.startswith("%")), names)
kept = runpy.run_path(str(names["run"].dir / "ppo_notebook.py"), run_name="kept")
assert "edited" in kept and "act" not in kept, "the script of the run is not that of the cells"
assert kept["Args"]().exp_name == names["run"].args.exp_name == "ppo_notebook"
policy = kept["load_policy"](names["run"].dir, names["eval_envs"], "cpu")
assert kept["evaluate"](policy, names["eval_envs"], 1).min() > 0
file = runpy.run_path(script, run_name="__main__")
assert file["global_step"] == names["global_step"] == 1024
assert (file["weights"] == names["weights"]).all() and (file["eval_returns"] == names["eval_returns"]).all()
"""


def cells(kind):
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def check(root=ROOT):
    command = [sys.executable, "scripts/notebook.py", "--check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_it_is_up_to_date(tmp_path):
    assert check().returncode == 0, check().stdout
    for path in ("cleanrl/ppo.py", "docs/rl-algorithms/ppo.md", "docs/notebooks/ppo.ipynb", "scripts/notebook.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    file = tmp_path / "cleanrl/ppo.py"
    file.write_text(file.read_text().replace("gamma: float = 0.99", "gamma: float = 0.9"))
    stale = check(tmp_path)
    assert stale.returncode == 1 and "docs/notebooks/ppo.ipynb: stale: run python scripts/notebook.py" in stale.stdout


def test_the_text_of_the_file_is_in_the_cells():
    """All of it but what a notebook does otherwise: the header, the docstring, where the main block begins, flags."""
    shown = "\n".join(cells("code")).split("\n")
    lines = [line.strip() for line in script("ppo").read_text().split('"""\n', 1)[1].split("\n") if line.strip()]
    here = {line.strip() for line in shown}
    gone = [line for line in lines if line not in here and line[:3] != "# /"]
    assert [line for line in gone if line not in script("ppo").read_text().split('"""\n')[0]] == [
        'if __name__ == "__main__":',
        "args = parse_args()",
    ]


def test_it_is_a_notebook():
    """What nbformat 4.5 asks for; outputs would be of a run that nobody can repeat."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    for cell in notebook["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code
        assert "".join(cell["source"]).strip() and not cell.get("outputs")
    (install,) = [cell for cell in cells("code") if cell.startswith("%pip")]
    assert re.findall('"(.+?)"', install) == header(script("ppo").read_text())["dependencies"]


def test_it_trains_what_the_file_trains(tmp_path):
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(script("ppo"))]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
