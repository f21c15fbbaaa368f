"""Slurm: an array job with one task per cell; slurm_template.sh is its script."""

import math
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from cleanrl_utils import counted, fail
from cleanrl_utils.engines import cells
from cleanrl_utils.engines.matrix import command_of
from cleanrl_utils.engines.queues import NAME, follow, forget_failures, name_of, write_lists

TEMPLATE = Path(__file__).with_name("slurm_template.sh")


def add_arguments(parser):
    group = parser.add_argument_group("--engine slurm", "an array job with one task per cell; --workers at a time")
    group.add_argument(
        "--slurm-template-path",
        type=Path,
        default=TEMPLATE,
        metavar="FILE",
        help=f"default: {TEMPLATE.name}, see there",
    )
    group.add_argument("--slurm-gpus-per-task", type=int, default=1, metavar="N", help="default: 1; 0 asks for none")
    group.add_argument("--slurm-total-cpus", type=int, default=1, metavar="N", help="CPU cores of a cell (default: 1)")
    group.add_argument(
        "--slurm-ntasks", type=int, default=1, metavar="N", help="Slurm's --ntasks of a cell (default: 1)"
    )
    group.add_argument("--slurm-nodes", type=int, metavar="N", help="Slurm's --nodes of a cell (default: not said)")
    group.add_argument(
        "--slurm-requeues", type=int, default=100, metavar="N", help="times that a task is started again (default: 100)"
    )
    group.add_argument("--slurm-detach", action="store_true", help="submit and leave; started again, it follows")


def fill(template, values):
    """A template with its {{names}} filled in; a line with one that has no value (None) is left out."""
    pattern, lines = re.compile(r"\{\{\s*(\w+)\s*\}\}"), []
    if unknown := set(pattern.findall(template)) - values.keys():
        fail(f"the Slurm template has {{{{{min(unknown)}}}}}; known are {', '.join(sorted(values))}")
    if missing := {"array", "command"} - set(pattern.findall(template)):
        fail(f"the Slurm template lacks {{{{{min(missing)}}}}}")
    for line in template.splitlines():
        if all(values[name] is not None for name in pattern.findall(line)):
            lines.append(pattern.sub(lambda match: str(values[match[1]]), line))
    return "\n".join(lines) + "\n"


def script_for(list_path, number, board, options):
    """The script for sbatch."""
    gpus, tasks = options.slurm_gpus_per_task, options.slurm_ntasks
    if options.slurm_requeues < 0:
        fail("--slurm-requeues must be at least 0")
    command = shlex.join(command_of(list_path, 0)[:-1])
    values = {
        "name": name_of(list_path),
        "array": f"0-{number - 1}" + (f"%{options.workers}" if options.workers else ""),
        "command": f'{command} "$SLURM_ARRAY_TASK_ID"',
        "logs": board.folder.resolve() / "slurm",
        "nodes": options.slurm_nodes,
        "requeues": options.slurm_requeues,
        "ntasks": tasks,
        "gpus_per_task": gpus or None,
        "cpus_per_gpu": math.ceil(options.slurm_total_cpus / (gpus * tasks)) if gpus else None,
        "cpus_per_task": None if gpus else math.ceil(options.slurm_total_cpus / tasks),
    }
    try:
        return fill(options.slurm_template_path.read_text(), values)
    except OSError as error:
        fail(f"--slurm-template-path: {error}")


def ask(*command):
    """What a program of Slurm says, or None if the controller does not answer, which may be for a while only."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout


def read_queue(board, lists):
    """index of a cell -> (job, task, state, reason) of what is in the queue, from this start or an earlier one."""
    answer = ask("squeue", "--me", "--noheader", "--array", "--format=%F|%K|%T|%j|%r")
    if answer is None:
        return None
    numbers, found = {cell["id"]: index for index, cell in enumerate(board.cells)}, {}
    for line in answer.splitlines():
        job, task, state, name, reason = line.split("|", 4)
        if not name.startswith(NAME) or not task.isdecimal():
            continue
        if name not in lists:
            lists[name] = (cells.read_json(board.folder / f"matrix-{name.removeprefix(NAME)}.json") or {}).get(
                "cells", []
            )
        if int(task) < len(lists[name]):
            index = numbers.get(lists[name][int(task)]["id"])
            if index is not None:
                found[index] = job, task, state, reason
    return found


def submit(matrix_path, board, options, lists):
    """Submit what is missing and not in the queue already; index of a cell -> (job, task) of all of them."""
    with (board.folder / "slurm" / "lock").open("a") as file:  # one start at a time looks and submits
        cells.fcntl.flock(file, cells.fcntl.LOCK_EX)
        for attempt in range(10):
            if (queue := read_queue(board, lists)) is not None:
                break
            time.sleep(5)
        else:
            fail("squeue does not answer: try it by hand")
        places = {index: place[:2] for index, place in queue.items() if board.states[index] != "done"}
        missing = [index for index in board.todo() if index not in places]
        forget_failures(board, missing)
        size = re.search(r"MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config") or "")
        job = None
        for part, path in write_lists(matrix_path, board, missing, int(size[1]) if size else 1001):
            script = board.folder / "slurm" / f"{name_of(path)}.sh"
            script.write_text(script_for(path, len(part), board, options))
            after = [f"--dependency=afterany:{job}"] if job else []  # --workers is for all of them
            command = ["sbatch", "--parsable", f"--job-name={name_of(path)}", *after, str(script)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                fail(f"{shlex.join(command)}: {done.stderr.strip()}")
            job = done.stdout.strip().split(";")[0]
            places |= {index: (job, str(task)) for task, index in enumerate(part)}
            print(f"Submitted job {job} with {counted(len(part), 'task')}", flush=True)
    return places


def show(matrix_path, board, options):
    """The scripts that would be submitted."""
    for part, path in write_lists(matrix_path, board, board.todo(), 1001):
        print(script_for(path, len(part), board, options), end="")


def run(matrix_path, board, options):
    """An array job over the missing cells. Jobs of an earlier start that are in the queue are followed."""
    for program in ("sbatch", "squeue", "scontrol"):
        if shutil.which(program) is None:
            fail(f"there is no {program} here: start this on a machine from which jobs are submitted to Slurm")
    logs, lists, told = board.folder / "slurm", {}, set()
    logs.mkdir(parents=True, exist_ok=True)
    places = submit(matrix_path, board, options, lists)
    jobs = sorted({job for job, _ in places.values()}, key=int)
    places_line = f"In the queue: {counted(len(places), 'cell')} in jobs {', '.join(jobs)}"
    print(f"{places_line}; to cancel them: scancel {' '.join(jobs)}", flush=True)

    def look():
        queue = read_queue(board, lists)
        for job, task, _, reason in (queue or {}).values():
            if "held" in reason.lower() and (job, task) not in told:
                told.add((job, task))
                board.clear()
                print(f"Slurm holds {job}_{task} ({reason}); to let it go: scontrol release {job}_{task}", flush=True)
        running = ("RUNNING", "COMPLETING")
        return queue and {i: "running" if place[2] in running else "waiting" for i, place in queue.items()}

    def note(index):
        return f"it left the queue without a result: {logs}/{'_'.join(places[index])}.txt"

    if options.slurm_detach:
        board.detached = True
        return False
    interrupted = follow(board, places, look, note)
    if interrupted:
        board.clear()
        print(f"The jobs go on. To follow them, the same command again; to cancel them: scancel {' '.join(jobs)}")
    return interrupted
