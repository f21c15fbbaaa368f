"""Run a command for every environment and seed, on this machine or on a cluster, and start it again to finish the rest.

    python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \\
        --command "python cleanrl/ppo.py --no-cuda" --num-seeds 3 --workers 5
    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --workers 2
    python -m cleanrl_utils.benchmark --suite benchmark/suites/proof.toml --status

A cell of the matrix is one command with one environment and one seed. Its record (log, lock, done marker) is a folder
in runs/.benchmark; see cleanrl_utils/engines/cells.py. Whatever was killed, the same command started again does the
rest: cells that are done are skipped, interrupted ones go on from their checkpoints, those that still run are waited
for. An edited script is another experiment: its cells are run anew.

Exit codes: 0 every cell is done, 1 some failed, 2 wrong usage, 75 interrupted (Ctrl+C, SIGTERM,
--stop-after): start it again.
"""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from cleanrl_utils import counted, fail
from cleanrl_utils.engines import ENGINES, cells, tags
from cleanrl_utils.engines.board import Board
from cleanrl_utils.engines.matrix import make_cells, write_matrix


def show_failures(board):
    """The end of the log of each cell that failed; the same words are shown once."""
    ends = {}
    for cell, state in zip(board.cells, board.states):
        if state == "failed":
            log = board.folder / cell["id"] / "log.txt"
            lines = log.read_text(errors="replace").replace("\r", "\n").splitlines() if log.exists() else []
            last = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
            end = "\n".join(f"    {line}" for line in lines[last + 1 :][-12:])
            ends.setdefault(end, []).append((cell, log))
    for end, failed in ends.items():
        cell, log = failed[0]
        more = f" and {len(failed) - 1} more with the same words" if len(failed) > 1 else ""
        print(f"\nFailed: {shlex.join(cell['command'])}{more}\n{end}\n    (all of it: {log})")


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--env-ids", nargs="+", default=[], metavar="ID", help="environments to run --command in")
    parser.add_argument("--command", default="", help='what to run, such as "python cleanrl/ppo.py --no-cuda"')
    parser.add_argument("--num-seeds", type=int, metavar="N", help="seeds per environment (default: 3)")
    parser.add_argument("--start-seed", type=int, metavar="N", help="the first seed (default: 1)")
    parser.add_argument("--suite", metavar="FILE", help="a TOML file of commands and environments: benchmark/suites")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="cells at a time; 0, the default, prints the commands only"
    )
    parser.add_argument("--engine", choices=ENGINES, default="local", help="where cells run (default: local)")
    parser.add_argument(
        "--gpus-per-cell", type=int, default=1, metavar="N", help="GPUs that a cell sees (default: 1; 0: all of them)"
    )
    parser.add_argument(
        "--retries", type=int, default=3, metavar="N", help="times that a killed cell is started again (default: 3)"
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        metavar="S",
        help="after as many seconds let the cells write checkpoints and end: 75",
    )
    parser.add_argument(
        "--no-mps", dest="mps", action="store_false", help="cells that share a GPU do so without NVIDIA's MPS"
    )
    parser.add_argument(
        "--skip-recorded", action="store_true", help="leave out cells whose finished runs are in benchmark/results"
    )
    parser.add_argument(
        "--status",
        action="store_true",
        help="print which files of cleanrl/ the runs of the suite prove, and run nothing",
    )
    parser.add_argument(
        "--state", type=Path, default=Path("runs/.benchmark"), metavar="DIR", help="records (default: runs/.benchmark)"
    )
    tags.add_arguments(parser)
    for engine in ENGINES.values():
        engine.add_arguments(parser)
    return parser.parse_args()


def main():
    options = parse_args()
    if sys.prefix != sys.base_prefix:  # `python` is this one, also where the virtual environment is not activated
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    engine = ENGINES[options.engine]
    if options.status:
        if not options.suite or options.command:
            fail("--status of what? --suite benchmark/suites/proof.toml")
        from cleanrl_utils.pages import proof  # and with it NumPy, which nothing else here needs

        return proof.show(options.suite)
    if cells.fcntl is None:
        fail("file locks of this kind do not exist on Windows: use WSL, or --workers 0 and a loop of your own")
    if bool(options.command) != bool(options.env_ids) or not (options.command or options.suite):
        fail("what to run? --command and --env-ids, or --suite")
    if options.workers < 0 or (options.num_seeds is not None and options.num_seeds < 1):
        fail("--workers must be at least 0 and --num-seeds at least 1")
    if min(options.retries, options.gpus_per_cell) < 0:
        fail("--retries and --gpus-per-cell must be at least 0")
    if options.stop_after is not None and (options.stop_after <= 0 or options.engine != "local"):
        fail("--stop-after must be above 0 and is for --engine local: queues have time limits of their own")
    matrix = {"cwd": str(Path.cwd()), "cells": make_cells(options)}
    if options.skip_recorded:
        from cleanrl_utils.pages import proof

        matrix["cells"] = proof.not_recorded(matrix["cells"])
    variables = tags.variables_of(matrix["cells"], options)
    matrix |= {"variables": variables} if variables else {}
    if options.workers == 0 and engine.show is None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
        tagged = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        for cell in matrix["cells"]:
            print(*tagged, shlex.join(cell["command"]))
        return
    board = Board(matrix, options.state, options.workers)
    matrix_path = write_matrix(matrix, options.state)
    if options.workers == 0:
        engine.show(matrix_path, board, options)
        return
    print(
        f"{counted(len(board.cells), 'cell')}, {board.count('done')} done before; records are in {options.state}",
        flush=True,
    )
    interrupted = engine.run(matrix_path, board, options) if board.todo() else False
    board.clear()
    print(board.line())
    show_failures(board)
    if interrupted:
        print("\nInterrupted. The same command goes on from here.")
    elif board.count("failed"):
        print("\nThe same command tries those that failed again.")
    missing = board.count("failed") if board.detached else len(board.todo())
    sys.exit(cells.INTERRUPTED if interrupted else 1 if missing else 0)


if __name__ == "__main__":
    main()
