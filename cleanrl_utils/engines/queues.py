"""What engines with a queue have in common: lists for array jobs, and following what is in the queue.

What became of a cell is read from its folder (done.json, failed.json), which all machines share; the queue only says
what is still to come.
"""

import json
import tempfile
import time

from cleanrl_utils.engines import cells
from cleanrl_utils.engines.board import stop_signals
from cleanrl_utils.engines.matrix import write_matrix

NAME = "cleanrl-"  # of a job, before the name of its list of cells
GRACE = 15.0  # seconds after the end of a job for its marker to be seen on a network file system


def write_lists(matrix_path, board, indices, size, **changes):
    """Write lists of some of the cells, of `size` at most, in which a cell is known by its number in an array job.

    The state folder is in them, so that the same cells in another folder have another name.
    """
    matrix = json.loads(matrix_path.read_text()) | {"state": str(board.folder.resolve())} | changes
    parts = [indices[i : i + size] for i in range(0, len(indices), size)]
    return [(part, write_matrix(matrix | {"cells": [board.cells[i] for i in part]}, board.folder)) for part in parts]


def name_of(list_path):
    return NAME + list_path.stem.removeprefix("matrix-")


def follow(board, wanted, look, note):
    """Show what becomes of cells that run elsewhere until all have ended; True if told to stop before.

    look() says what is in the queue, index -> "waiting" or "running", or None if there is no answer this time.
    """
    stopping, begun, gone, wanted, silent = stop_signals(), time.monotonic(), {}, set(wanted), False
    while wanted and not stopping.is_set():
        queue = look()
        if (queue is None) != silent and not stopping.is_set():
            silent = queue is None
            board.clear()
            print(f"The queue {'does not answer; what is in it may go on' if silent else 'answers again'}", flush=True)
        for index in sorted(wanted):
            folder = board.folder / board.cells[index]["id"]
            if cells.is_done(folder):
                board.set(index, "done")
            elif queue is None:
                continue
            elif index in queue:
                board.set(index, queue[index])
                gone.pop(index, None)
            elif failed := cells.read_json(folder / "failed.json"):
                board.set(index, "failed", f"exit code {failed['code']}")
            elif time.monotonic() - gone.setdefault(index, time.monotonic()) > GRACE:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):  # makes a network file system look at the folder again
                    pass
                board.set(index, *(["done"] if cells.is_done(folder) else ["failed", note(index)]))
        wanted = {index for index in wanted if board.states[index] not in ("done", "failed")}
        board.draw()
        if wanted:
            stopping.wait(1 if time.monotonic() - begun < 60 else 5)
    return bool(wanted)


def forget_failures(board, indices):
    """A failure that is on record after this is one of the jobs that are submitted now."""
    for index in indices:
        (board.folder / board.cells[index]["id"] / "failed.json").unlink(missing_ok=True)
