"""The scalars in a run's TensorBoard files: `read_scalars(run_dir)["charts/episodic_return"]` is rows of (step, value).

A bare loop over the records, several times as fast as TensorBoard's reader. A run that is still being written, or was
killed in the middle of a record, is read up to its last whole record. `follow(run_dir)` goes on where it stopped.
`read_series(run_dir, tags)` reads some tags only, with the time of training at each, many times as fast again, and tags
of eval/ also from the folder of that name, where checkpoints are evaluated (follow.py).
"""

import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event


def spans(data):
    """Where the events of the whole records in some bytes begin and end."""
    start, size = 12, len(data)  # 8 bytes length, 4 checksum, the event, 4 checksum
    while start <= size:
        end = start + struct.unpack_from("<Q", data, start - 12)[0]
        if end + 4 > size:
            break
        yield start, end
        start = end + 16


def records(file, position=0):
    """The whole records of a file from a position on, each as (its end, the event)."""
    with Path(file).open("rb") as stream:
        stream.seek(position)
        data = stream.read()
    for start, end in spans(data):
        yield position + end + 4, Event.FromString(data[start:end])


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


def find_scalars(data, tag):
    """The steps, values and wall times of a tag in the bytes of a file, or None if one is laid out in an unusual way.

    Writers lay a scalar out in one way: the record's length, a checksum, wall time, step (left out where it is 0), then
    the tag and the value alone. So the name of the tag is searched for, and what belongs to it lies around it.
    """
    name = tag.encode()
    if len(name) > 100:  # lengths of more than a byte
        return None
    mark = b"\x0a%c%b" % (len(name), name)
    pieces = np.array([len(piece) for piece in data.split(mark)[:-1]], dtype=np.int64)
    value_at = np.cumsum(pieces + len(mark))
    value_at = value_at[value_at + 9 <= len(data)]  # the last record may be half written
    raw, at = np.frombuffer(data, np.uint8), value_at - len(mark) - 4  # of the summary in which the tag is

    def numbers(at, kind):
        return raw[at[:, None] + np.arange(np.dtype(kind).itemsize)].view(kind)[:, 0]

    usual = np.frombuffer(b"\x2a%c\x0a%c" % (len(name) + 9, len(name) + 7), "<u4")
    if (at < 21).any() or (numbers(at, "<u4") != usual).any() or (raw[value_at] != 0x15).any():
        return None
    steps, walls = np.zeros(len(at), dtype=np.int64), np.full(len(at), np.nan)
    for size in (5, 4, 3, 2, 0, 6, 7, 8, 9, 10, 11):  # of a step, of which the first byte says that it is one
        if not np.isnan(walls).any():
            break
        left = np.flatnonzero(np.isnan(walls) & (at >= 21 + size))
        body = at[left] - size - 9
        fits = (raw[body] == 9) & (numbers(body - 12, "<u8") == (value_at[left] + 5 - body).astype(np.uint64))
        left, body = left[fits], body[fits]
        for i in range(size - 1):
            steps[left] |= (raw[body + 10 + i].astype(np.int64) & 0x7F) << 7 * i
        walls[left] = numbers(body + 1, "<f8")
    return None if np.isnan(walls).any() else (steps, numbers(value_at + 1, "<f4").astype(float), walls)


def parse_scalars(data, tag):
    """The same in whatever way they are laid out, slowly; of events with a time."""
    rows = []
    for event in (Event.FromString(data[start:end]) for start, end in spans(data)):
        for value in event.summary.value if event.wall_time else ():
            if value.tag == tag and value.HasField("simple_value"):
                rows.append((event.step, value.simple_value, event.wall_time))
    steps, values, walls = zip(*rows) if rows else ((), (), ())
    return np.array(steps, dtype=np.int64), np.array(values), np.array(walls)


def times(data):
    """The wall time of each record."""
    bodies = (start for start, end in spans(data) if end > start + 8 and data[start] == 9)
    return (struct.unpack_from("<d", data, start + 1)[0] for start in bodies)


def read_series(run_dir, tags):
    """The scalars of some tags: tag -> (steps, values, seconds, wall times), each an array in the order of writing.

    The seconds are those of training: since the run was begun, without the time between a stop and its resumption.
    """
    series = {tag: [(np.zeros(0, dtype=np.int64), *np.zeros((3, 0)))] for tag in tags}
    files, before, begun = [file.read_bytes() for file in Path(run_dir).glob("events*")], 0.0, [(0.0, 0.0)]
    for data in sorted(files, key=lambda data: next(times(data), np.inf)):
        first = next(times(data), np.inf)
        begun.append((first, before))
        for tag in tags:
            steps, values, walls = find_scalars(data, tag) or parse_scalars(data, tag)
            series[tag].append((steps, values, walls - first + before, walls))
        if len(files) > 1:
            before += max(times(data), default=first) - first
    firsts, offsets = np.transpose(begun)
    for file in sorted(Path(run_dir, "eval").glob("events*")):
        data = file.read_bytes()
        for tag in (tag for tag in tags if tag.startswith("eval/")):
            steps, values, walls = find_scalars(data, tag) or parse_scalars(data, tag)
            at = np.searchsorted(firsts, walls, side="right") - 1
            series[tag].append((steps, values, walls - firsts[at] + offsets[at], walls))
    return {tag: tuple(np.concatenate(column) for column in zip(*parts)) for tag, parts in series.items()}
