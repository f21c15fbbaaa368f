"""cleanrl_utils.events reads what TensorBoard reads, while a run is being written and after it was resumed."""

import os

from conftest import tensorboard_scalars
from torch.utils.tensorboard import SummaryWriter

from cleanrl_utils.events import follow, read_scalars


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
