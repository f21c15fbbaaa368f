"""Which files of cleanrl/ are proven: the runs that a suite asks for beside those that were made.

A file is proven if all runs of the suite for it have come to their ends, with all seeds and steps; partly proven if
some have, or if there is any run of it, stopped early or with other flags; else nothing is.
"""

import contextlib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cleanrl_utils.engines import cells
from cleanrl_utils.engines.matrix import read_suite
from cleanrl_utils.pages import facts
from cleanrl_utils.runs import results

SUITE = "benchmark/suites/proof.toml"
HEAD = ["File", "Environment", "Steps", "Seeds", "Score", "Reference", "State"]
FREE = {"env_id", "num_seeds", "buffer_device", "teacher_policy_hf_repo"}  # besides the flags of every run


class Goal(NamedTuple):
    """What a suite asks for of a file in an environment."""

    name: str
    env_id: str
    command: str
    steps: int
    seeds: list
    reference: str = ""  # the file, and maybe the environment, whose published score stands beside it


def flags_of(name, said):
    """The flags of a file that its learning depends on, from those that a command or args.json says."""
    known, values = facts.flags(results.ROOT, name), {}
    said = {key[3:] if key.startswith("no_") and key not in known else key: (key, value) for key, value in said.items()}
    for flag in list(known)[: list(known).index("exp_name")]:  # then come the flags of every run
        key, value = said.get(flag, (flag, known[flag][1].strip('"')))
        values[flag] = results.plain(value) if key == flag else "False"
    return {flag: value for flag, value in values.items() if flag not in FREE}


def make_goal(command, env_id, seeds, reference=""):
    """The goal of a command, or None if it runs no file of cleanrl/."""
    name, said = Path(cells.script_of(shlex.split(command))[1] or "").stem, results.flags(command)
    if name not in facts.lineage(results.ROOT):
        return None
    seeds = sorted({seed + i for seed in seeds for i in range(int(said.get("num_seeds", 1)))})  # side by side
    return Goal(name, env_id, command, int(float(flags_of(name, said)["total_timesteps"])), seeds, reference)


def goals(suite):
    """Name of a file -> its goals, in the order of the suite; runs of the same command and environment are one goal."""
    found = {}
    for run in read_suite(suite):
        first = run.get("start_seed", 1)
        for command in run["commands"]:
            for env_id in run["env_ids"]:
                seeds = range(first, first + run.get("num_seeds", 3))
                if goal := make_goal(command, env_id, seeds, run.get("reference", "")):
                    other = found.setdefault((command, env_id), goal)
                    found[command, env_id] = goal._replace(seeds=sorted({*goal.seeds, *other.seeds}))
    return {name: [goal for goal in found.values() if goal.name == name] for name in facts.lineage(results.ROOT)}


def of_file(goal, runs):
    return [run for run in runs if Path(run.script).stem == goal.name and run.env_id == goal.env_id]


def finished(goal, runs):
    """The runs that have reached the goal, one of each of its seeds at most."""
    said, found = flags_of(goal.name, results.flags(goal.command)), {}
    for run in of_file(goal, runs):
        if run.ended and run.seed in goal.seeds and flags_of(goal.name, run.args) == said:
            found.setdefault(run.seed, run)
    return list(found.values())


def published(root, goal):
    """The published score beside a goal, with its file, environment or steps where those differ."""
    file, *env_id = goal.reference.split() or [f"{goal.name}.py"]
    row = {"file": f"cleanrl/{file}", "env_id": (env_id or [goal.env_id])[0], "steps": goal.steps}
    said = facts.reference(root, row | {"command": goal.command, "reference_mean": ""})
    return f"{said} (`{file}`)" if said and file != f"{goal.name}.py" else said


def line(root, goal, runs):
    """The cells of a goal's row, but for its file and state; of one that is not reached, the furthest runs so far."""
    done, steps, score = finished(goal, runs), facts.short(goal.steps), ""
    if done:
        score = np.mean([run.score for run in done])
    elif begun := [run for run in of_file(goal, runs) if not np.isnan(run.score)]:
        furthest = max(run.last_step for run in begun)
        score = np.mean([run.score for run in begun if 1.02 * run.last_step >= furthest])
        steps = f"{facts.short(furthest)} of {steps}"
    score = facts.figures(float(score))[0] if score != "" else ""
    seeds = f"{len(done)} of {len(goal.seeds)}"
    return [goal.env_id.split(":")[-1], steps, seeds, score, published(root, goal)]


def table(root, suite, runs):
    """A row for each goal of each file, in the order of the page of results, and the line that counts the states."""
    asked, rows, states = goals(suite), [], []
    for name in (name for names in facts.by_page(root).values() for name in names):
        own = asked.get(name, [])
        if own and all(len(finished(goal, runs)) == len(goal.seeds) for goal in own):
            state = "proven"
        else:
            state = "partly" if any(Path(run.script).stem == name for run in runs) else "nothing"
        states.append(state)
        rows += [[name, *line(root, goal, runs), state] for goal in own] or [[name, "", "", "", "", "", state]]
    count = f"{states.count('proven')} of {len(states)} proven"
    return rows, f"{count}, {states.count('partly')} partly, {states.count('nothing')} not begun."


def page(root, link):
    """The table for the page of results, from what is recorded."""
    rows, count = table(root, root / SUITE, results.load([root / "benchmark/results"]))
    rows = [[f"[`{name}.py`]({link(name)})", *rest] for name, *rest in rows]
    return f"**{count}**\n\n{facts.table(HEAD, rows, 'llrrrr')}"


def front(root, link, page_link):
    """The table for the README: of each file what it is for, and of its goals the one that it has come closest to."""
    runs, asked, rows = results.load([root / "benchmark/results"]), goals(root / SUITE), []
    for page, names in facts.by_page(root).items():
        for name in names:
            cells = [line(root, goal, runs) for goal in asked.get(name, [])] or [["", "", "", "", ""]]
            env_id, steps, seeds, score, reference = next((row for row in cells if row[3]), cells[0])
            done = int(seeds.split(" of ")[0] or 0)
            run = f"{re.sub(r'(NoFrameskip)?-v[0-9]+$', '', env_id)}, {steps.split(' of ')[0]}"
            run += f", {done} seed{'s' * (done > 1)}" if done else ", stopped early"
            domain = facts.algorithms(root)[name][1].rpartition(": ")[0].replace("vector observations", "vectors")
            title = facts.page_title(root, page)
            where = f"[{title.rpartition('(')[2].rstrip(')')}]({page_link(f'rl-algorithms/{page}.md')})"
            rows.append([f"[`{name}.py`]({link(name)})", domain, run if score else "", score, reference, where])
    return facts.table(["File", "For", "Recorded", "Score", "Published", "Page"], rows, "lllrrl")


def show(suite):
    """Print the table, from what is recorded and from the run folders here."""
    runs = results.load([results.ROOT / "benchmark/results"])
    with contextlib.suppress(ValueError):  # no run folder there
        runs += results.load(["runs"])
    rows, count = table(results.ROOT, suite, runs)
    rows = [[state, f"{name}.py", *cells, reference.replace("`", "")] for name, *cells, reference, state in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(count)


def not_recorded(matrix):
    """The cells whose finished runs are not in benchmark/results."""
    runs = results.load([results.ROOT / "benchmark/results"])

    def missing(cell):
        goal = make_goal(shlex.join(cell["command"]), cell["env_id"], [cell["seed"]])
        return goal is None or len(finished(goal, runs)) < len(goal.seeds)

    return list(filter(missing, matrix))
