"""Make an animated picture of a trained agent for a page: python scripts/clip.py RUN -o docs/static/ppo-cartpole.webp

Plays an episode of a run with a model, on a seed that training has not seen, and writes its first seconds as an
animated WebP. Needs the extra `video`. Exit codes: 0 written, 1 larger than --limit, 2 wrong usage.
"""

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def write_clip(path, frames, fps, width, quality=60):
    """Frames (time, height, width, 3) as an animated picture of this width; returns its size in bytes."""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    size = width, round(images[0].height * width / images[0].width)
    first, *others = [image.resize(size, Image.Resampling.LANCZOS) for image in images]
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"duration": round(1000 / fps), "loop": 0, "quality": quality, "method": 6, "minimize_size": True}
    first.save(path, save_all=True, append_images=others, **options)
    return path.stat().st_size


def read_film(path, fps, seconds):
    """The frames of the first seconds of a film, so many per second."""
    from moviepy import VideoFileClip

    with VideoFileClip(str(path)) as film:
        return list(film.subclipped(0, min(seconds, film.duration)).iter_frames(fps=fps))


def main(argv=None):
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("run", type=Path, help="a run folder with a model (--save-model)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture, X.webp")
    parser.add_argument("--seconds", type=float, default=6, help="length at most (default: 6)")
    parser.add_argument("--fps", type=int, default=15, help="frames per second (default: 15)")
    parser.add_argument("--width", type=int, default=240, help="width in pixels (default: 240)")
    parser.add_argument("--limit", type=int, default=300_000, help="bytes at most (default: 300000)")
    options = parser.parse_args(argv)
    if options.output.suffix != ".webp":
        parser.error(f"{options.output}: write to a file that ends in .webp")
    if find_spec("moviepy") is None:
        parser.error('moviepy is missing: pip install -e ".[video]"')
    from cleanrl_utils.evaluate import CannotPlay, evaluate_run

    with tempfile.TemporaryDirectory() as folder:
        try:
            returns = evaluate_run(options.run, episodes=1, capture_video=True, video_folder=folder)
        except CannotPlay as error:
            parser.error(str(error))
        (film,) = Path(folder).glob("*.mp4")
        frames = read_film(film, options.fps, options.seconds)
    size = write_clip(options.output, frames, options.fps, options.width)
    print(f"{options.output}: {len(frames)} frames, {size} bytes, of an episode with a return of {returns.mean():.1f}")
    if size > options.limit:
        print(f"more than {options.limit} bytes: take fewer --seconds or a smaller --width")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
