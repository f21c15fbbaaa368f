"""--capture-video films several stages of training, and a resumed run keeps the films of its first part."""

import pytest

from helpers.files import LINEAGE, continuous_control, defines, each_text, family, require, require_for, script, smoke
from helpers.processes import in_short, run, run_dir

VIDEO_ENV = {"discrete": "CartPole-v1", "continuous": "Pendulum-v1"}  # these render fast
TOTAL = {"ppo": 2048, "dqn": 1000, "c51": 1000, "pqn": 2048} | dict.fromkeys(("ddpg", "td3", "sac"), 1900)
FILMS = ["make_env", "record_video", "record_game", "film_game", "film_match", "film_level", "film_episode"]
FILMING = each_text(*FILMS)


def films(cwd):
    return {path.name: path.read_bytes() for path in (run_dir(cwd) / "videos").glob("*.mp4")}


# one file for each function that films; each text of such functions: slow
FUNCTIONS = {tuple(film for film in FILMS if defines(name, f"def {film}")): name for name in FILMING.args[1][::-1]}
FILMED = each_text(
    *FILMS,
    lines="video|film_|record_",
    which=lambda name: "    capture_video: bool" in script(name).read_text(),  # a headless Godot draws nothing
)
FILMED.args[1][:] = [
    name if name in FUNCTIONS.values() else pytest.param(name, marks=pytest.mark.slow) for name in FILMED.args[1]
]


@FILMED
def test_films_of_several_stages(name, tmp_path):
    require("moviepy")
    require_for(name)
    from moviepy import VideoFileClip

    argv = [*smoke(name), "--capture-video"]
    if "tensor_sims" in LINEAGE[name]["smoke"]:  # clips, by the steps of the simulator
        argv = [*smoke(name, record_video_step_frequency=20), "--capture-video"]
    elif "probes" in LINEAGE[name]:
        env_id = VIDEO_ENV[LINEAGE[name]["probes"]]
        flags = {"env_id": env_id, "num_envs": 1, "total_timesteps": TOTAL[family(name)]}
        if continuous_control(name):  # the third film is of the ninth episode, each of 200 steps
            flags["learning_starts"] = 10_000  # nothing is learned meanwhile
        argv = [*smoke(name, **flags), "--capture-video"]
    run(script(name), *argv, cwd=tmp_path, **in_short(name))
    first = films(tmp_path)
    assert len(first) >= 3
    for path in (run_dir(tmp_path) / "videos").glob("*.mp4"):
        with VideoFileClip(str(path)) as clip:
            frame = clip.get_frame(0)
            assert clip.n_frames >= 5 and frame.ndim == 3 and frame.std() > 0, path

    if name not in FUNCTIONS.values():
        return
    total = int(argv[argv.index("--total-timesteps") + 1]) * 5 // 4
    run(script(name), "--resume", run_dir(tmp_path), "--total-timesteps", total, cwd=tmp_path, **in_short(name))
    second = films(tmp_path)
    assert len(second) > len(first)
    assert {file: second[file] for file in first} == first, "a film of the first part was written over"


@pytest.mark.parametrize("name", [name for name in LINEAGE if "probes" in LINEAGE[name]][:1])
def test_no_film_unless_asked(name, tmp_path):
    require_for(name)
    run(script(name), *smoke(name), "--save-model", cwd=tmp_path)
    assert not (run_dir(tmp_path) / "videos").exists()
