"""cleanrl_utils.runs.events reads what TensorBoard reads, while a run is being written and after it was resumed."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import SummaryWriter

from cleanrl_utils.runs.events import follow, read_scalars, read_series
from helpers.files import load, require
from helpers.scalars import tensorboard_scalars
from helpers.synthetic_runs import scalar, write_events


def test_as_tensorboard(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.add_text("hyperparameters", "none", 0)
        for step in range(1000):
            writer.add_scalar("charts/SPS", step**0.5, 3 * step)
            writer.add_scalar("losses/loss", -step, step)
    read = {tag: [tuple(row) for row in rows] for tag, rows in read_scalars(tmp_path).items()}
    assert read == tensorboard_scalars(tmp_path)


def test_follows_a_run(tmp_path):
    positions = {}
    writer = SummaryWriter(tmp_path)
    writer.add_scalar("a", 1.0, 1)
    writer.flush()
    assert follow(tmp_path, positions) == [("a", 1, 1.0)]
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    writer.add_scalar("a", 2.0, 2)
    writer.close()
    assert follow(tmp_path, positions) == [("a", 2, 2.0)] and follow(tmp_path, positions) == []
    with file.open("ab") as stream:
        stream.write(b"\x20\0\0\0\0\0\0\0half a record")
    assert follow(tmp_path, positions) == []
    os.truncate(file, size)  # as a resumed run does
    assert follow(tmp_path, positions) is None
    assert follow(tmp_path, positions) == [("a", 1, 1.0)]


def tensorboard_series(folder, tag):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]


@pytest.mark.parametrize("library", ["torch", "tensorboardX", "jax"])
def test_series_as_tensorboard(library, tmp_path, monkeypatch):
    """In the layout of each writer: step 0, which the format leaves out, large steps, negative values, long tags."""
    require(library)
    make = SummaryWriter if library == "torch" else None
    if library == "tensorboardX":
        from tensorboardX import SummaryWriter as make
    if library == "jax":
        make = load("dqn_jax").SummaryWriter
    tags = [
        "charts/episodic_return",
        "charts/episodic_return-player0",
        "é",
        "long/" + "tag" * 60,
        "longer/" + "t" * 300,
    ]
    parsed = []
    counted = SimpleNamespace(FromString=lambda data: parsed.append(data) or Event.FromString(data))
    monkeypatch.setattr("cleanrl_utils.runs.events.Event", counted)
    writer = make(str(tmp_path))
    writer.add_text("hyperparameters", "|charts/episodic_return|", 0)
    for step in (0, 1, 127, 128, 16384, 2**31, 2**40 + 1, 2**62):
        for tag in tags:
            for value in (-1.5, 0.0, float(np.float32(0.1)), 1e30, -1e-30):
                writer.add_scalar(tag, value, step)
        writer.add_scalar("losses/other", 1.0, step)
    writer.close()
    assert set(read_series(tmp_path, tags[:3])) == set(tags[:3]) and not parsed
    series = read_series(tmp_path, tags)
    assert set(series) == set(tags)
    for tag in tags:
        steps, values, seconds, walls = series[tag]
        assert list(zip(steps.tolist(), values.tolist(), walls.tolist())) == tensorboard_series(tmp_path, tag)
        assert (seconds >= 0).all() and np.allclose(np.diff(seconds), np.diff(walls))
    assert parsed  # for the two long tags
    assert read_series(tmp_path, ["none"])["none"][0].shape == (0,)


def test_series_in_other_layouts(tmp_path):
    """Two values in a record, metadata, a negative step, a file that ends in zeros: parsed or left out."""
    odd = [Summary.Value(tag="a", simple_value=1), Summary.Value(tag="b", simple_value=2)]
    described = SummaryMetadata(display_name="a")
    events = [
        *(Event(wall_time=100, file_version="brain.Event:2"), Event(wall_time=101, step=1, summary=Summary(value=odd))),
        *(scalar(102, "a", 3, 2, metadata=described), scalar(103, "a", 4, -5), scalar(104, "ab", 5, 6)),
        *(Event(summary=Summary(value=odd)), Event(wall_time=105, log_message={"message": "a"})),
    ]
    write_events(tmp_path / "events.1", events)
    with (tmp_path / "events.1").open("ab") as file:
        file.write(b"\0" * 40)
    (tmp_path / "events.2").touch()
    series = read_series(tmp_path, ["a", "b"])
    assert [list(column) for column in series["a"]] == [[1, 2, -5], [1, 3, 4], [1, 2, 3], [101, 102, 103]]
    assert [list(column) for column in series["b"]] == [[1], [2], [1], [101]]


def test_seconds_without_the_gap_of_a_resume(tmp_path):
    """The files of a run are read in the order of their beginnings, and nothing counts between two of them."""
    start = Event(wall_time=1000, file_version="brain.Event:2")
    write_events(tmp_path / "events.z", [start, scalar(1010, "a", 1, 1), scalar(1020, "b", 1, 2)])
    start = Event(wall_time=9000, file_version="brain.Event:2")
    write_events(tmp_path / "events.a", [start, scalar(9005, "a", 2, 3)])
    steps, values, seconds, _ = read_series(tmp_path, ["a"])["a"]
    assert (list(steps), list(values), list(seconds)) == ([1, 3], [1, 2], [10, 25])
