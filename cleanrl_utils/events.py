"""The scalars in a run's TensorBoard files: `read_scalars(run_dir)["charts/episodic_return"]` is rows of (step, value).

A bare loop over the records, several times as fast as TensorBoard's reader. A run that is still being written, or was
killed in the middle of a record, is read up to its last whole record. `follow(run_dir)` goes on where it stopped.
"""

import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event


def records(file, position=0):
    """The whole records of a file from a position on, each as (its end, the event)."""
    with Path(file).open("rb") as stream:
        stream.seek(position)
        data = stream.read()
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)  # 8 bytes length, 4 checksum, the event, 4 checksum
        end = start + 12 + length + 4
        if end > len(data):
            break
        yield position + end, Event.FromString(data[start + 12 : end - 4])
        start = end


def begun(file):
    """When a file was begun, by its first record: a resumed run writes several files."""
    return next((event.wall_time for _, event in records(file)), float("inf"))


def follow(run_dir, positions):
    """The scalars that are new since `positions` (file name -> bytes read, updated here), as (tag, step, value).

    When a resumed run has taken back what it will write again, a file is shorter than what was read of it: then None is
    returned and `positions` emptied, and the caller starts over.
    """
    scalars = []
    files = list(Path(run_dir).glob("events*"))
    if any(file.stat().st_size < positions.get(file.name, 0) for file in files):
        positions.clear()
        return None
    for file in sorted(files, key=begun) if len(files) > 1 else files:
        for end, event in records(file, positions.get(file.name, 0)):
            positions[file.name] = end
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    scalars.append((value.tag, event.step, value.simple_value))
    return scalars


def read_scalars(run_dir):
    """Every scalar of a run: tag -> array of rows (step, value), in the order of writing."""
    rows = defaultdict(list)
    for tag, step, value in follow(run_dir, {}):
        rows[tag].append((step, value))
    return {tag: np.array(rows[tag]) for tag in rows}
