"""Animated pictures of agents: how they are made, and that those of the pages are small."""

import importlib.util
import re

import numpy as np
import pytest

from helpers.files import ROOT, require

PICTURES = sorted((ROOT / "docs/static").glob("*.webp"))


@pytest.fixture
def clip():
    require("PIL")
    spec = importlib.util.spec_from_file_location("clip", ROOT / "scripts/clip.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_frames_become_a_picture(clip, tmp_path):
    from PIL import Image

    frames = np.zeros((5, 40, 60, 3), dtype=np.uint8)
    for i, frame in enumerate(frames):
        frame[:, 10 * i : 10 * i + 10, 0] = 255  # a red bar that moves to the right
    size = clip.write_clip(tmp_path / "new/x.webp", frames, fps=10, width=30)
    assert size == (tmp_path / "new/x.webp").stat().st_size < 5000
    with Image.open(tmp_path / "new/x.webp") as picture:
        assert picture.n_frames == 5 and picture.size == (30, 20) and picture.info["loop"] == 0
        places = []
        for i in range(5):
            picture.seek(i)
            picture.load()
            assert picture.info["duration"] == 100
            places.append(np.asarray(picture.convert("RGB"), dtype=float)[:, :, 0].mean(0).argmax())
    assert places == sorted(places) and places[-1] >= 20


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere", "-o", "x.webp"], "nowhere is not a run with a model"),
        (["nowhere", "-o", "x.gif"], "x.gif: write to a file that ends in .webp"),
    ],
)
def test_wrong_usage(clip, argv, message, tmp_path, monkeypatch, capsys):
    require("moviepy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        clip.main(argv)
    assert end.value.code == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_pictures_of_pages(path):
    """They move, are small enough for a page, and a page shows them with words for those who do not see them."""
    require("PIL")
    from PIL import Image

    with Image.open(path) as picture:
        assert picture.n_frames >= 20 and picture.width <= 320  # what stays as it is, is one frame
    assert path.stat().st_size <= 300_000
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/rl-algorithms").glob("*.md"))
    assert re.search(rf"!\[\w[^]]+\]\(\.\./static/{path.name}\)", pages)
