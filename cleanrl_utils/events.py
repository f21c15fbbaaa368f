"""The scalars in a run's TensorBoard files: `read_scalars(run_dir)["charts/episodic_return"]` is rows of (step, value).

A bare loop over the records, several times as fast as TensorBoard's reader. A run that is still being written, or was
killed in the middle of a record, is read up to its last whole record. `follow(run_dir)` goes on where it stopped.
`read_series(run_dir, tags)` reads some tags only, with the time of training at each, several times as fast again.
"""

import re
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


def scan(data, tags):
    """The scalars of some tags in the bytes of a file, as tag -> rows (step, value, wall time), with the times of the
    first and of the last record.

    Writers lay a scalar out in one way: wall time, step (left out where it is 0), then the tag and the value alone.
    Such records are taken apart by hand, others are skipped unless the name of a tag is in them: those are parsed.
    """
    names = [tag.encode() for tag in tags]
    named = b"|".join(re.escape(bytes([min(len(name), 127)]) + name) for name in names)  # longer ones are parsed
    layout = rb"\x09.{8}(?:\x10([\x80-\xff]{0,8}[\0-\x7f]))?\x2a.\x0a.\x0a(" + named + rb")\x15(.{4})"
    match, mentions = re.compile(layout, re.DOTALL).fullmatch, re.compile(b"|".join(map(re.escape, names))).search
    length_at, double, single = (struct.Struct(kind).unpack_from for kind in ("<Q", "<d", "<f"))
    rows = {tag: [] for tag in tags}
    start, size, first, last = 0, len(data), float("inf"), float("-inf")
    while start + 12 <= size:
        (length,) = length_at(data, start)
        body, end = start + 12, start + 12 + length
        if end + 4 > size:
            break
        start = end + 4
        if length < 9 or data[body] != 9:  # without a wall time: not an event of ours
            continue
        (last,) = double(data, body + 1)
        first = min(first, last)
        if found := match(data, body, end):
            varint, tag, value = found.groups()
            step = 0
            for byte in reversed(varint or b""):
                step = step << 7 | byte & 0x7F
            rows[tag[1:].decode()].append((step, single(value)[0], last))
        elif mentions(data, body, end):
            for value in (event := Event.FromString(data[body:end])).summary.value:
                if value.tag in rows and value.HasField("simple_value"):
                    rows[value.tag].append((event.step, value.simple_value, last))
    return rows, first, last


def read_series(run_dir, tags):
    """The scalars of some tags: tag -> (steps, values, seconds, wall times), each an array in the order of writing.

    The seconds are those of training: since the run was begun, without the time between a stop and its resumption.
    """
    rows, before = {tag: [] for tag in tags}, 0.0
    scans = [scan(file.read_bytes(), tags) for file in Path(run_dir).glob("events*")]
    for found, first, last in sorted(scans, key=lambda scan: scan[1]):
        for tag in tags:
            rows[tag] += [(step, value, wall - first + before, wall) for step, value, wall in found[tag]]
        before += max(0.0, last - first)
    series = {tag: np.array(rows[tag], dtype=float).reshape(-1, 4).T for tag in tags}
    return {tag: (table[0].astype(np.int64), *table[1:]) for tag, table in series.items()}
