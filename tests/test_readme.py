"""The README and the pages name every file as it is."""

import re

from conftest import LINEAGE, ROOT, default, each


@each()
def test_the_row_of_a_file(name):
    """Its environment is the default, its parent that of the lineage, and its page exists and names it."""
    readme = (ROOT / "README.md").read_text()
    (row,) = re.findall(rf"(?m)^\| \[`{name}\.py`\]\(cleanrl/{name}\.py\) \|.*$", readme)
    *_, environments, parent, page, _ = (cell.strip() for cell in row.split("|"))
    assert parent == (f"`{LINEAGE[name]['parent']}.py`" if "parent" in LINEAGE[name] else "")
    assert environments.endswith(f": {default(name, 'env_id')}")
    (path,) = re.findall(r"\((docs/rl-algorithms/[\w-]+\.md)\)", page)
    assert f"`{name}.py`" in (ROOT / path).read_text()


def test_commands_run_files_that_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for path in re.findall(r"python (cleanrl/\w+\.py)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
