"""Each rule of the style check fires on a bad example and stays quiet on a good one, in small repositories."""

import subprocess
import sys
from pathlib import Path

import pytest

from cleanrl_utils import style

ROOT = Path(__file__).parents[2]

LINEAGE = """\
[alpha]
lines = 200
smoke = ""

[alpha_wide]
parent = "alpha"
changed = 12
lines = 200
smoke = ""

[alpha_jax]
parent = "alpha"
changed = 40
lines = 200
smoke = ""

[beta]
lines = 200
smoke = ""
"""

ALPHA = '''\
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "gymnasium[mujoco]>=1.2", "tensorboard>=2.19", "torch>=2.8", "tyro>=0.9",
# ]
# ///
"""An algorithm."""

import time
from dataclasses import dataclass
from pathlib import Path

import ale_py
import gymnasium as gym
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    gamma: float = 0.99  # discount

    exp_name: str = Path(__file__).stem  # name
    seed: int = 1  # random seed
    entity: str | None = None  # team


def make_env(env_id):
    return lambda: gym.make(env_id, ale=ale_py)


def layer_init(layer):
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.critic = layer_init(nn.Linear(4, 1))


@torch.no_grad()
def discounted(rewards, gamma):
    total = 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
    return total


# What a run needs besides its algorithm: the same text in every file, skip it at first reading


def fail(message):
    raise SystemExit(message)


class Run:
    def __init__(self, args):
        if args.entity:
            import wandb

            wandb.init(entity=args.entity)
        self.writer = SummaryWriter(Path(args.exp_name))

    def save(self, state):
        torch.save(state, "checkpoint")

    def close(self):
        self.writer.close()


def evaluate(policy):
    return policy(0)


if __name__ == "__main__":
    # Checks
    args = tyro.cli(Args)
    run = Run(args)

    # Seeding
    torch.manual_seed(args.seed)

    # Environments, agent and optimizer
    agent = Agent(None)

    # Storage: one array
    rewards = []

    # Training loop
    start = time.time()
    for step in range(3):
        # Act
        rewards.append(step)

        # Targets
        value = discounted(rewards, args.gamma)

        # Learn
        agent.critic.bias.grad = None

        # Log
        run.writer.add_scalar("value", value, step)

        # Checkpoint
        print(time.time() - start)

    # Save and close
    run.close()
'''

WIDE = ALPHA.replace("nn.Linear(4, 1)", "nn.Linear(64, 1)").replace(
    "lambda: gym.make(env_id,", "lambda: gym.make(env_id, 1,"
)
JAX = (
    ALPHA.replace('"tensorboard>=2.19", "torch>=2.8"', '"flax>=0.10", "jax>=0.7", "tensorboardX>=2.6"')
    .replace("import torch\n", "import jax\n")
    .replace(
        "from torch import nn\nfrom torch.utils.tensorboard import",
        "from flax import linen as nn\nfrom tensorboardX import",
    )
    .replace("nn.init.zeros_(layer.bias)", "nn.initializers.zeros(layer)")
    .replace("@torch.no_grad()", "@jax.jit")
    .replace("torch.save", "jax.save")
    .replace("torch.manual_seed(args.seed)", "key = jax.random.key(args.seed)")
)
BETA = ALPHA.replace("        # Targets\n", "")  # the one optional heading


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl/lineage.toml").write_text(LINEAGE)
    for name, text in {"alpha": ALPHA, "alpha_wide": WIDE, "alpha_jax": JAX, "beta": BETA}.items():
        (tmp_path / f"cleanrl/{name}.py").write_text(text)
    return tmp_path


def edit(repo, file, old, new):
    path = repo / "cleanrl" / file
    text = path.read_text()
    assert text.count(old) == 1, f"the example has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def check(repo, capsys, *argv):
    code = style.main(["--root", str(repo), *argv])
    return code, capsys.readouterr().out.splitlines()


def test_silent_on_good_files(repo, capsys):
    assert check(repo, capsys) == (0, [])


# file, old text, new text, the expected finding without the folder: one for each edit
BAD = {
    "a decorated definition drifts": (
        ("beta.py", "@torch.no_grad()\n", ""),
        "beta.py:45: drift: discounted differs from alpha.py",
    ),
    "a comment in a shared function drifts": (
        ("alpha_wide.py", "    total = 0.0\n", "    total = 0.0  # why\n"),
        "alpha_wide.py:45: drift: discounted differs from alpha.py",
    ),
    "a helper of the block that uses no backend drifts between backends": (
        ("alpha_jax.py", "    raise SystemExit(message)", "    raise SystemExit(2)"),
        "alpha_jax.py:56: drift: fail differs from alpha.py",
    ),
    "a method of the block that uses no backend drifts between backends": (
        ("alpha_jax.py", "        self.writer.close()", "        self.writer.flush()"),
        "alpha_jax.py:71: drift: Run.close differs from alpha.py",
    ),
    "the block drifts within a backend": (
        ("alpha_wide.py", "    return policy(0)", "    return policy(1)"),
        "alpha_wide.py:53: block: the marked block differs from alpha.py; --fix copies it",
    ),
    "no block": (
        ("beta.py", "# What a run needs", "# What the run needs"),
        "beta.py:1: block: there is no marked block",
    ),
    "a function before the flags": (
        ("beta.py", "@dataclass\nclass Args", "def early():\n    return 1\n\n\n@dataclass\nclass Args"),
        "beta.py:21: order: Args comes before early",
    ),
    "a function behind the block": (
        ("beta.py", 'if __name__ == "__main__"', 'def late():\n    return 1\n\n\nif __name__ == "__main__"'),
        "beta.py:79: order: late stands behind the block",
    ),
    "a film before the block": (
        ("beta.py", "# What a run needs", "def film_game(path):\n    return 1\n\n\n# What a run needs"),
        "beta.py:53: order: film_game stands before the block, named as a film; move it behind the block",
    ),
    "an equation behind the block, named as a film": (
        (
            "beta.py",
            'if __name__ == "__main__"',
            'def record_gae(rewards):\n    return 1\n\n\nif __name__ == "__main__"',
        ),
        "beta.py:79: order: record_gae stands behind the block",
    ),
    "a class behind the block, named as a film": (
        ("beta.py", 'if __name__ == "__main__"', 'class film_it:\n    path = 1\n\n\nif __name__ == "__main__"'),
        "beta.py:79: order: film_it stands behind the block",
    ),
    "hyperparameters behind the flags of a run": (
        (
            "beta.py",
            "    gamma: float = 0.99  # discount\n\n    exp_name: str = Path(__file__).stem  # name\n",
            "    exp_name: str = Path(__file__).stem  # name\n    gamma: float = 0.99  # discount\n",
        ),
        "beta.py:23: order: exp_name comes behind the hyperparameters",
    ),
    "a repository import": (
        ("alpha.py", "import time\n", "import time, cleanrl_utils.style\n"),
        "alpha.py:9: import: cleanrl_utils.style is of the repository",
    ),
    "an import of a neighbour, in a function": (
        ("beta.py", "def make_env(env_id):\n", "def make_env(env_id):\n    from alpha import Agent\n\n"),
        "beta.py:31: import: alpha.Agent is of the repository",
    ),
    "a relative import": (
        ("beta.py", "import tyro\n", "import tyro\nfrom . import alpha\n"),
        "beta.py:17: import: ..alpha is of the repository",
    ),
    "a heading is missing": (
        ("beta.py", "    # Storage: one array\n", ""),
        "beta.py:92: heading: # Storage belongs here; the main block has, 4 spaces in, # Checks",
    ),
    "a heading of the loop is out of order": (
        (
            "beta.py",
            "        # Learn\n        agent.critic.bias.grad = None\n\n        # Log\n",
            "        # Log\n        # Learn\n",
        ),
        "beta.py:101: heading: # Learn belongs here; the training loop has, 8 spaces in",
    ),
    "a heading twice": (
        ("beta.py", "    rewards = []\n", "    rewards = []\n    # Storage\n"),
        "beta.py:92: heading: # Training loop belongs here; the main block has",
    ),
    "shared text differs from the parent": (
        ("alpha_wide.py", "torch.manual_seed(args.seed)\n", "torch.manual_seed(args.seed + 1)\n"),
        "alpha_wide.py:84: text: # Seeding differs from alpha.py",
    ),
    "the last shared text differs": (
        ("alpha_wide.py", "    run.close()\n", "    run.close()\n    print()\n"),
        "alpha_wide.py:111: text: # Save and close differs from alpha.py",
    ),
    "an exception that is not needed": (
        ("lineage.toml", "changed = 12\n", 'changed = 12\ndiffers = ["Seeding"]\n'),
        "alpha_wide.py:84: text: # Seeding is now that of alpha.py; remove it from `differs`",
    ),
    "a flag of another type": (
        ("beta.py", "gamma: float", "gamma: float | None"),
        "beta.py:23: flag: gamma is of type float | None, but float in alpha.py",
    ),
    "a flag with another help": (
        ("alpha_jax.py", "# discount\n", "# discount factor\n"),
        "alpha_jax.py:23: flag: gamma has another help in alpha.py, `discount`",
    ),
    "a flag without help": (
        ("alpha.py", "None  # team\n", "None\n"),
        "alpha.py:27: flag: entity has no help",
    ),
    "a flag without effect": (
        (
            "beta.py",
            "    seed: int = 1  # random seed\n",
            "    seed: int = 1  # random seed\n    extra: int = 1  # no use\n",
        ),
        "beta.py:27: flag: extra has no effect: args.extra is never read",
    ),
    "a flag that is only written": (
        ("beta.py", "value = discounted(rewards, args.gamma)", "value = args.gamma = discounted(rewards, 1)"),
        "beta.py:23: flag: gamma has no effect",
    ),
    "a default of another type": (
        ("beta.py", "seed: int = 1 ", "seed: int = 1.0 "),
        "beta.py:26: flag: seed is declared int but defaults to 1.0",
    ),
    "a function reads a variable of the main block": (
        ("beta.py", "def make_env(env_id):\n", "def make_env(env_id):\n    rewards.clear()\n"),
        "beta.py:31: global: make_env uses rewards",
    ),
    "a method reads a variable of the main block": (
        ("beta.py", "layer_init(nn.Linear(4, 1))", "layer_init(nn.Linear(len(run), 1))"),
        "beta.py:42: global: Agent uses run",
    ),
    "an inner function declares one global": (
        (
            "beta.py",
            "def make_env(env_id):\n",
            "def make_env(env_id):\n    def f():\n        global step\n        step = 1\n\n",
        ),
        "beta.py:33: global: make_env uses step",
    ),
    "an import that the header lacks": (
        ("beta.py", '"ale-py>=0.11", ', ""),
        "beta.py:13: header: ale-py is imported but not in the PEP 723 header",
    ),
    "an import in a try that the header lacks": (
        (
            "beta.py",
            "\n\n@dataclass",
            "\n\ntry:\n    import envpool\nexcept ImportError:\n    envpool = None\n\n\n@dataclass",
        ),
        "beta.py:22: header: envpool is imported but not in the PEP 723 header",
    ),
    "a writer that the header lacks": (
        ("beta.py", '"tensorboard>=2.19", ', ""),
        "beta.py:18: header: tensorboard is imported but not in",
    ),
    "an optional package in the header": (
        ("beta.py", '"tyro>=0.9"', '"tyro>=0.9", "wandb>=0.20"'),
        "beta.py:1: header: wandb is in the PEP 723 header but not imported at the top",
    ),
    "no lower bound": (
        ("beta.py", '"tyro>=0.9"', '"tyro"'),
        "beta.py:1: header: tyro has no lower bound",
    ),
    "no header": (
        ("beta.py", "# /// script\n", ""),
        "beta.py:1: header: the PEP 723 header is wrong ('dependencies')",
    ),
    "a long line": (
        ("beta.py", "    rewards = []\n", f"    rewards = []  # {'x' * 101}\n"),
        "beta.py:91: width: 121 characters, at most 120",
    ),
    "a long function": (
        ("beta.py", "def make_env(env_id):\n", "def make_env(env_id):\n" + "    print()\n" * 44),
        "beta.py:30: length: make_env has 46 lines, at most 45",
    ),
    "too many lines": (
        ("lineage.toml", "[beta]\nlines = 200\n", "[beta]\nlines = 84\n"),
        "beta.py:1: budget: 85 lines to read, budget 84",
    ),
    "too many changed lines": (
        ("lineage.toml", "changed = 12\n", "changed = 3\n"),
        "alpha_wide.py:1: budget: 4 lines changed against alpha.py, budget 3",
    ),
    "no budget": (
        ("lineage.toml", "changed = 12\n", ""),
        "lineage.toml:5: lineage: [alpha_wide] has no budget `changed`",
    ),
    "a table without a file": (
        ("lineage.toml", "[beta]\n", "[gamma]\nlines = 1\n\n[beta]\n"),
        "lineage.toml:17: lineage: [gamma] has no file cleanrl/gamma.py",
    ),
    "a file without a table": (
        ("lineage.toml", '[beta]\nlines = 200\nsmoke = ""\n', ""),
        "beta.py:1: lineage: no table [beta] in cleanrl/lineage.toml",
    ),
    "an unknown parent": (
        ("lineage.toml", "[beta]\n", '[beta]\nparent = "delta"\nchanged = 1\n'),
        "lineage.toml:17: lineage: [beta] has the parent delta, which is unknown",
    ),
    "its own parent": (
        ("lineage.toml", "[beta]\n", '[beta]\nparent = "beta"\nchanged = 1\n'),
        "lineage.toml:17: lineage: [beta] has the parent beta, which is unknown or its own descendant",
    ),
    "broken TOML": (
        ("lineage.toml", "[beta]\n", "[beta\n"),
        "lineage.toml:1: lineage: ",
    ),
    "broken Python": (
        ("beta.py", "class Agent(nn.Module):\n", "class Agent(nn.Module)\n"),
        "beta.py:39: syntax: ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_rule_fires(case, repo, capsys):
    change, expected = BAD[case]
    edit(repo, *change)
    code, lines = check(repo, capsys)
    assert code == 1
    assert len(lines) == 1 and lines[0].startswith(f"cleanrl/{expected}"), lines


# What looks like drift and is allowed.
GOOD = {
    "networks differ": ("beta.py", "class Agent(nn.Module):\n", "class Agent(nn.Module):\n    # other\n"),
    "a function with torch differs from the one with flax": (
        "alpha_jax.py",
        "    return layer\n",
        "    return layer, 1\n",
    ),
    "shared text differs between backends": (
        "alpha_jax.py",
        "    run.close()\n",
        "    run.close()\n    print()\n",
    ),
    "unrelated roots have texts of their own": ("beta.py", "    run.close()\n", "    run.close()\n    print()\n"),
    "a function of the main block reads its variables": (
        "beta.py",
        "    rewards = []\n",
        "    rewards = []\n\n    def act():\n        global value\n        value = rewards, step\n",
    ),
    "a comment at the depth of a heading": (
        "beta.py",
        "    rewards = []\n",
        "    # Seeding later, not now\n    rewards = []\n",
    ),
    "a line of 120": ("beta.py", "    rewards = []\n", f"    rewards = []  # {'x' * 100}\n"),
    "a function of 45": ("beta.py", "def make_env(env_id):\n", "def make_env(env_id):\n" + "    print()\n" * 43),
    "a package in an if": (
        "beta.py",
        "class Agent(nn.Module):\n",
        "if time:\n    import moviepy\n\n\nclass Agent(nn.Module):\n",
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_rule_stays_quiet(case, repo, capsys):
    edit(repo, *GOOD[case])
    assert check(repo, capsys) == (0, [])


def test_a_film_is_not_a_line_to_read(repo, capsys):
    film = "def film_game(path):\n    print(path)\n\n\n"
    edit(repo, "lineage.toml", "[beta]\nlines = 200\n", "[beta]\nlines = 85\n")
    edit(repo, "beta.py", 'if __name__ == "__main__"', f'{film}if __name__ == "__main__"')
    assert check(repo, capsys) == (0, [])
    edit(repo, "beta.py", "film_game(path)", "play_game(path)")
    code, found = check(repo, capsys)
    assert code == 1 and any("89 lines to read" in line for line in found)


def test_module_subclasses_may_differ_and_other_classes_not(repo, capsys):
    new = "class {}:\n    x = {}\n\n\ndef make_env(env_id):\n"
    for name, x in (("alpha", 1), ("beta", 2)):
        edit(repo, f"{name}.py", "def make_env(env_id):\n", new.format("Critic(nn.Module)", x))
        edit(repo, f"{name}.py", "def make_env(env_id):\n", new.format("Twin(Critic)", x))
        edit(repo, f"{name}.py", "def make_env(env_id):\n", new.format("Buffer", x))
    edit(repo, "lineage.toml", "changed = 12", "changed = 40")
    edit(repo, "lineage.toml", 'changed = 40\nlines = 200\nsmoke = ""\n\n[beta]', "changed = 80\nlines = 200\n\n[beta]")
    code, lines = check(repo, capsys)
    assert code == 1 and len(lines) == 1 and lines[0].startswith("cleanrl/beta.py:38: drift: Buffer"), lines


def test_listed_exception(repo, capsys):
    edit(repo, "alpha_wide.py", "torch.manual_seed(args.seed)\n", "torch.manual_seed(args.seed + 1)\n")
    edit(repo, "lineage.toml", "changed = 12\n", 'changed = 12\ndiffers = ["Seeding"]\n')
    assert check(repo, capsys) == (0, [])


def test_files_restrict_the_report(repo, capsys):
    edit(repo, "beta.py", "    rewards = []\n", f"    rewards = []  # {'x' * 101}\n")
    assert check(repo, capsys, str(repo / "cleanrl/alpha.py")) == (0, [])
    assert check(repo, capsys, str(repo / "cleanrl/beta.py"))[0] == 1
    with pytest.raises(SystemExit) as exit:
        check(repo, capsys, str(repo / "cleanrl/delta.py"))
    assert exit.value.code == 2


def test_fix_copies_from_the_root_of_the_lineage(repo, capsys):
    edit(repo, "alpha.py", "    total = 0.0\n", "    total = 0\n")
    edit(repo, "alpha.py", "# discount\n", "# discount factor\n")
    edit(repo, "beta.py", "    return policy(0)", "    print()\n    print()\n    return policy(0)")
    edit(
        repo,
        "alpha_wide.py",
        "import time\nfrom dataclasses import dataclass\n",
        "from dataclasses import dataclass\nimport time\n",
    )
    jax = (repo / "cleanrl/alpha_jax.py").read_text()
    code, lines = check(repo, capsys, "--fix")
    assert code == 0 and len(lines) == 6 and all(": fixed: " in line for line in lines), lines
    fixed = {path.stem: path.read_text() for path in (repo / "cleanrl").glob("*.py")}
    assert fixed["alpha_wide"] == WIDE.replace("total = 0.0", "total = 0").replace(
        "# discount\n", "# discount factor\n"
    )
    assert fixed["beta"] == BETA.replace("total = 0.0", "total = 0").replace("# discount\n", "# discount factor\n")
    assert fixed["alpha_jax"] == jax.replace("# discount\n", "# discount factor\n")  # its `discounted` is its own
    assert check(repo, capsys) == (0, [])


def test_fix_reports_what_it_cannot_repair(repo, capsys):
    edit(repo, "beta.py", "    total = 0.0\n", "    total = 0\n")
    edit(repo, "beta.py", "gamma: float", "gamma: float | None")
    code, lines = check(repo, capsys, "--fix")
    assert code == 1 and [line.split(": ")[1] for line in lines] == ["fixed", "flag"], lines


FAIL = "raise SystemExit(message)"


@pytest.mark.parametrize(("old", "new"), [(FAIL, "raise SystemExit(1)"), ("# team", "# W&B team")])
def test_fix_copies_what_uses_no_backend_from_torch_to_jax(repo, capsys, old, new):
    edit(repo, "alpha.py", old, new)
    code, lines = check(repo, capsys, "--fix")
    assert code == 0 and len(lines) == 3 and all(": fixed: " in line for line in lines), lines
    assert (repo / "cleanrl/alpha_jax.py").read_text() == JAX.replace(old, new)


@pytest.mark.parametrize("drifted", [["beta_jax"], ["alpha", "alpha_wide", "beta"]])
def test_fix_copies_what_uses_no_backend_to_some_or_all_jax_files(repo, capsys, drifted):
    edit(repo, "lineage.toml", "[beta]", '[beta_jax]\nparent = "alpha_jax"\nchanged = 40\nlines = 200\n\n[beta]')
    (repo / "cleanrl/beta_jax.py").write_text(JAX)
    for name in drifted:
        edit(repo, f"{name}.py", FAIL, "raise SystemExit(1)")
    code, lines = check(repo, capsys, "--fix")
    assert code == 0 and all("_jax.py:5" in line and ": fixed: " in line for line in lines), lines
    alpha, *others = (FAIL in (repo / f"cleanrl/{name}.py").read_text() for name in ("alpha", "alpha_jax", "beta_jax"))
    assert others == [alpha, alpha]


def test_fix_copies_nothing_between_backends_that_never_was_the_same(repo, capsys):
    new = "def total(x):\n    return x.{}()\n\n\ndef make_env(env_id):\n"  # methods, of tensors or of arrays
    for file, method in (("alpha", "clamp_"), ("alpha_wide", "clamp_"), ("alpha_jax", "clip")):
        edit(repo, f"{file}.py", "def make_env(env_id):\n", new.format(method))
    before = (repo / "cleanrl/alpha_jax.py").read_text()
    code, lines = check(repo, capsys, "--fix")
    assert code == 1 and len(lines) == 1 and ": drift: total" in lines[0], lines
    assert (repo / "cleanrl/alpha_jax.py").read_text() == before


def test_list(repo, capsys):
    code, lines = check(repo, capsys, "--list")
    assert code == 0
    assert lines[0].split() == ["file", "lines", "budget", "main", "mean", "changed", "budget", "parent"]
    assert ["alpha", "86", "200", "34", "25.3", "-", "-", "-"] in [line.split() for line in lines]
    assert ["alpha_wide", "86", "200", "34", "25.4", "4", "12", "alpha"] in [line.split() for line in lines]


def test_this_repository_is_clean():
    done = subprocess.run([sys.executable, "-m", "cleanrl_utils.style"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
