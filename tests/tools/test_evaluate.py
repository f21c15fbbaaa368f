"""python -m cleanrl_utils.evaluate plays the saved model of a run folder, whichever file made it.

test_life.py plays the policy of every file in both modes.
"""

import importlib
import json
import os
import re
import shutil
import sys
from contextlib import closing
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_utils.runs.follow import Followed
from cleanrl_utils.runs.results import load as load_runs
from helpers.files import FILES, ROOT, load, require, require_for, script, smoke, uses
from helpers.processes import environment, finish, in_short, run, run_dir, run_module, start
from helpers.scalars import raw_scalars, tensorboard_scalars
from helpers.synthetic_runs import write_run

# for each backend; with memory; with a game that has lives; whose policy is deterministic
PLAYED = ["ppo", "ppo_continuous_action_lstm", "ppo_atari_envpool", "sac_continuous_action_jax", "ppo_trxl", "ppo_jax"]
FILMED = ["ppo", "ppo_atari_envpool", "ppo_jax", "ppo_procgen"]  # by environments or functions, of several signatures


def play(*argv, cwd, code=0, kind="torch"):
    done = run_module("cleanrl_utils.evaluate", *argv, cwd=cwd, kind=kind, code=code)
    assert "Unable to save last video" not in done.stderr, "the filming environments were not closed"
    return done.stdout if code == 0 else done.stderr


def check_film(path):
    from moviepy import VideoFileClip

    with VideoFileClip(str(path)) as clip:
        assert clip.n_frames >= 5 and clip.get_frame(0).std() > 0


def check_window(folder):
    """The images of an episode are shown as they come, whatever films it, and its return is that of the policy."""
    from cleanrl_utils.evaluate import default_device, load_run, watch

    images = []
    window = SimpleNamespace(show=lambda image, fps: images.append((image.shape, image.dtype.name, image.std(), fps)))
    module, args = load_run(folder)
    args["cuda"], device = False, default_device(module, cpu=True)
    (returns,) = watch(module, args, folder, device, 7, None, window)
    assert len(images) >= 5 and len(set(images)) > 2 and all(fps >= 15 for *_, fps in images)
    assert {(len(shape), shape[2], kind) for shape, kind, *_ in images} == {(3, 3, "uint8")}
    assert args["env_id"] != "CartPole-v1" or len(images) - returns in (1, 2), "each step, and one or two resets"
    assert "moviepy" not in sys.modules or hasattr(sys.modules["moviepy"], "VideoFileClip"), "left changed"


def test_what_is_imported_meanwhile_stays(tmp_path, monkeypatch):
    from cleanrl_utils.evaluate import stand_in

    for name in ("shown", "helper_of_shown"):
        (tmp_path / f"{name}.py").write_text("loaded = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shown

    with stand_in("shown", None), pytest.raises(ImportError):
        import helper_of_shown

        first = helper_of_shown.loaded
        importlib.import_module("shown")
    assert importlib.import_module("shown") is shown
    assert importlib.import_module("helper_of_shown").loaded is first
    with stand_in("not_there", shown):
        assert importlib.import_module("not_there") is shown
    assert "not_there" not in sys.modules


@pytest.mark.parametrize("name", [name for name in FILES if "from moviepy import" in script(name).read_text()])
def test_games_can_be_watched(name):
    """What films a game calls the policy where the images are, under the name by which they are found."""
    if name == "ppo_continuous_action_isaacgym":  # whose simulator films
        return
    text = script(name).read_text()
    filming = re.search(r"(?ms)^    def film\(obs\):$.*?^    \S", text[text.index("from moviepy import") - 999 :])[0]
    assert "frames.append(" in filming and "policy(obs)" in filming


def test_window(tmp_path, monkeypatch):
    """Images of several sizes; closed by the user, or broken; and one line where there is no screen."""
    from cleanrl_utils.runs import window

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    with window.Window("title") as shown:
        for size in (210, 160, 3), (210, 160, 3), (400, 600, 3), (1, 2, 3):
            shown.show(np.full(size, 200, np.uint8), fps=1000)
    assert shown.shown == 4 and shown.process.returncode == 0
    with window.Window("title") as broken:
        broken.process.kill()
        broken.process.wait()
        with pytest.raises(window.NoWindow, match="has failed"):
            broken.show(np.zeros((2, 2, 3), np.uint8), fps=1000)
    (tmp_path / "closed.py").write_text("print('ready')")
    with monkeypatch.context() as patched:
        patched.setattr(window, "__file__", str(tmp_path / "closed.py"))
        with window.Window("title") as closed:
            closed.process.wait()
            with pytest.raises(window.Closed):
                closed.show(np.zeros((2, 2, 3), np.uint8), fps=1000)
    for argv, told in (
        (["--render"], "enjoy: --render: there is no screen"),
        (["--render", "--capture-video"], "one of"),
    ):
        blind = {"SDL_VIDEODRIVER": None, "DISPLAY": None, "WAYLAND_DISPLAY": None, "PYTHONPATH": str(ROOT)}
        if sys.platform == "linux":
            done = run_module("cleanrl_utils.enjoy", tmp_path, *argv, cwd=tmp_path, env=environment(**blind), code=2)
            assert told in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


SLOW = [pytest.param("ppo_procgen", marks=pytest.mark.slow)]  # whose environments begin with a reset


@pytest.mark.parametrize("name", [name for name in PLAYED if name in FILES] + SLOW)
def test_plays(name, tmp_path):
    require_for(name)
    argv = [*smoke(name, **{"total_timesteps": 256} if "atari" in name else {}), "--save-model"]
    run(script(name), *argv, cwd=tmp_path, **in_short(name))
    folder = run_dir(tmp_path).relative_to(tmp_path)
    kind = "torch" if uses(name, "torch") else "jax"
    number = 10 if name in ("ppo", "sac_continuous_action_jax") else 3  # 10 is what is not asked for
    flags = [] if number == 10 else ["--episodes", number]
    first = play(folder, *flags, cwd=tmp_path, kind=kind)
    returns = [float(value) for value in re.findall(r"episode \d+: return (.+)", first)]
    assert len(returns) == number and f"Mean return of {number} episodes: {np.mean(returns):.1f}"[:-2] in first
    again = play(folder, *flags, *["--capture-video"] * (name in FILMED), cwd=tmp_path, kind=kind)
    assert again.endswith(first), "the same seed, another result"
    if name in FILMED:
        require("moviepy")
        film = folder / f"videos/eval-{1 + 2**30}.mp4"
        assert again == f"Film: {film}\n{first}" and os.listdir(tmp_path / folder / "videos") == [film.name]
        check_film(tmp_path / film)
        check_window(run_dir(tmp_path))
    else:
        assert again == first and not (tmp_path / folder / "videos").exists()
    if name == "ppo_jax":  # whose shapes are compared when it acts
        args = json.loads((tmp_path / folder / "args.json").read_text())
        (tmp_path / folder / "args.json").write_text(json.dumps(args | {"env_id": "Acrobot-v1"}))
        assert "the model does not fit the script" in play(folder, cwd=tmp_path, kind=kind, code=2).splitlines()[-1]
    if name == "sac_continuous_action_jax":
        logged = [value for tag, _, value in raw_scalars(run_dir(tmp_path)) if tag == "eval/episodic_return"]
        assert returns == pytest.approx(logged, abs=0.01), "not the policy that the file evaluated"


def test_modes_and_wrong_usage(tmp_path, monkeypatch, capsys):
    assert "no-such-run is not a run with a model" in play("no-such-run", cwd=tmp_path, code=2)
    run(script("ppo"), *smoke("ppo", seed=3), "--save-model", cwd=tmp_path)
    folder, played = run_dir(tmp_path), {}
    for mode in [], ["--stochastic"], ["--deterministic"], ["--deterministic", "--seed", 4]:
        play(folder, *mode, "--episodes", 3, "--output", "result.json", cwd=tmp_path)
        played[tuple(mode)] = result = json.loads((tmp_path / "result.json").read_text())
        assert len(result["returns"]) == 3 and result["mean"] == pytest.approx(np.mean(result["returns"]))
        assert result["seed"] == (4 if "--seed" in mode else 3 + 2**30)
    usual, stochastic, deterministic, other = (result["returns"] for result in played.values())
    assert usual == stochastic != deterministic != other, "ppo.py evaluates with draws"

    assert "not allowed with" in play(folder, "--deterministic", "--stochastic", cwd=tmp_path, code=2)
    assert "--episodes" in play(folder, "--episodes", 0, cwd=tmp_path, code=2)
    assert "Exit codes: 0" in play("--help", cwd=tmp_path)
    text = (folder / "ppo.py").read_text()
    (folder / "ppo.py").write_text(text.replace("device, deterministic=False):", "device):\n    deterministic = False"))
    play(folder, "--episodes", 1, cwd=tmp_path)
    assert "has one mode only" in play(folder, "--deterministic", cwd=tmp_path, code=2), "of an older version"
    (folder / "ppo.py").write_text(text)
    check_wrong_usage(folder, tmp_path, monkeypatch, capsys)


def check_wrong_usage(folder, tmp_path, monkeypatch, capsys):
    """One line and exit code 2 before anything is played; from Python an error that a loop over runs can catch."""
    import torch
    from safetensors.numpy import load_file, save_file

    from cleanrl_utils.evaluate import evaluate_run, main

    def wrong(words, *argv, python=True):
        monkeypatch.setattr(sys, "argv", ["evaluate", str(folder), *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        assert end.value.code == 2 and captured.out == "", captured
        assert words in captured.err and captured.err.count("\n") == 1, captured.err
        if python:
            with pytest.raises(ValueError, match=re.escape(words)):
                evaluate_run(folder)

    assert len(evaluate_run(folder, seed=5, episodes=2)) == 2 and capsys.readouterr().err == ""
    for seed in 2, 3, 4:
        evaluate_run(folder, seed=seed, episodes=2)
        assert re.fullmatch(r"evaluate: seed \d: not held out, .* seeds 3 to 4\n", capsys.readouterr().err)
    (tmp_path / "file").touch()
    for path in tmp_path, tmp_path / "no/result.json", tmp_path / ("long" * 99):
        wrong(f"--output {path}: ", "--output", path, python=False)
    wrong("--capture-video", "--video-folder", tmp_path / "file", python=False)

    with monkeypatch.context() as older:  # as `pip install godot-rl` brings it
        older.delattr("gymnasium.vector.AutoresetMode")
        wrong("is too old for ppo.py: pip install 'gymnasium>=")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-9])
    wrong("the model does not fit the script: SafetensorError", "--output", tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (folder / "model.safetensors").write_bytes(weights)
    save_file({f"other.{name}": x for name, x in load_file(folder / "model.safetensors").items()}, folder / "other")
    os.replace(folder / "other", folder / "model.safetensors")
    wrong("the model does not fit the script: RuntimeError")
    (folder / "model.safetensors").unlink()
    checkpoint = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").unlink()
    wrong("model.safetensors and a checkpoint are missing: train with --save-model")
    for data, told in (
        (checkpoint[:-99], "is not a checkpoint with a model"),
        (b"", "is not a checkpoint with a model"),
    ):
        (folder / "checkpoint.pt").write_bytes(data)
        wrong(told)
    torch.save({"global_step": 1, "policy": {}}, folder / "checkpoint.pt")
    wrong("holds no weights under the name of agent or of q_network")
    (folder / "model.safetensors").write_bytes(weights)
    for broken in "{", "{}", "[1]", '{"env_id": "CartPole-v1", "seed": null}':
        (folder / "args.json").write_text(broken)
        wrong("args.json does not hold the flags of a run")


@pytest.mark.parametrize("name", ["dqn", "ddpg_continuous_action_jax"])
def test_plays_a_checkpoint(name, tmp_path):
    """Of a run that was stopped, or ended without a model, with the returns of the model; `latest` is the newest."""
    require_for(name)
    kind = "torch" if uses(name, "torch") else "jax"
    run(script(name), *smoke(name), "--save-model", cwd=tmp_path)
    folder = run_dir(tmp_path)
    first = play("latest", "--episodes", 2, cwd=tmp_path, kind=kind)
    assert "checkpoint" not in first
    (folder / "model.safetensors").unlink()
    again = play("latest", "--episodes", 2, cwd=tmp_path, kind=kind)
    total = json.loads((folder / "args.json").read_text())["total_timesteps"]
    assert again == f"Playing the checkpoint of step {total} of {total}\n{first}"
    assert not (folder / "model.safetensors").exists()
    done = run_module("cleanrl_utils.enjoy", "latest", "--episodes", 2, cwd=tmp_path, kind=kind)
    assert done.stdout == again
    if name == "dqn":
        check_names(folder, tmp_path)


def check_names(folder, tmp_path):
    """`latest` wherever a run folder is expected, the last that was begun or resumed; one line where there is none."""

    def said(tool, *argv, cwd=tmp_path, code=0):
        done = run_module(f"cleanrl_utils.{tool}", *argv, cwd=cwd, code=code)
        return done.stderr if code else done.stdout

    assert "# dqn.py on 'CartPole-v1', seed 1" in said("reproduce", "latest")
    assert "identical: " in said("reproduce", "--compare", "latest", folder)
    require("yaml")
    assert "The weights are those of a checkpoint, at step" in said("runs.card", "latest")
    (tmp_path / "runs/other").mkdir()
    shutil.copy(folder / "args.json", tmp_path / "runs/other")
    os.utime(tmp_path / "runs/other/args.json", (1, 1))
    assert [run.folder for run in load_runs(folder)] == [folder] and "dqn.py" in said("reproduce", "latest")
    os.utime(tmp_path / "runs/other/args.json")
    assert "runs/other is not a run with a model" in play("latest", cwd=tmp_path, code=2)
    (tmp_path / "empty").mkdir()
    for tool in ["evaluate"], ["enjoy"], ["hub", "push"], ["reproduce"], ["runs.card"], ["compare", folder]:
        line = said(*tool, "latest", cwd=tmp_path / "empty", code=2)
        assert line.endswith(": latest is the newest run in runs/, and there is none: name a run folder\n"), line
    for words in [], ["latest", "--exp-name", "dqn"], ["--exp-name", "dqn"]:
        assert said("enjoy", *words, code=2).count("\n") == 1


def curve_of(folder, tag="eval/mean_return"):
    return [(step, value) for other, step, value in raw_scalars(folder) if other == tag]


def test_follows_a_run(tmp_path):
    """From before its first step until its end, which the follower notices; and on after a resume, nothing twice."""
    require_for("ppo")
    from cleanrl_utils.evaluate import CHOOSING, evaluate_run

    (tmp_path / "runs").mkdir()
    short = ["--num-envs", 2, "--num-steps", 32, "--num-minibatches", 2]
    process = start(
        script("ppo"), *short, "--total-timesteps", 2048, "--checkpoint-freq", 64, "--no-cuda", cwd=tmp_path
    )
    told = play("--follow", "runs", "--eval-episodes", 2, cwd=tmp_path)
    finish(process)
    folder = run_dir(tmp_path)
    curve, trained = curve_of(folder / "eval"), raw_scalars(folder)
    assert [step for step, _ in curve] == sorted({step for step, _ in curve}) and curve[-1][0] == 2048
    assert tensorboard_scalars(folder / "eval")["eval/mean_return"] == curve
    returns = evaluate_run(folder, 2, seed=1 + CHOOSING, cpu=True, deterministic=True)
    assert curve[-1][1] == pytest.approx(returns.mean()), "not greedy, or not on the seeds to choose by"
    assert f"{folder.name}: step 2048 of 2048: mean return {returns.mean():.2f} +- {returns.std():.2f}, 2 epi" in told
    best = max(value for _, value in curve)
    assert np.mean([value for _, value in curve_of(folder / "best", "eval/episodic_return")]) == pytest.approx(best)
    assert evaluate_run(folder / "best", 2, seed=1 + CHOOSING, deterministic=True).mean() == pytest.approx(best)

    assert play("--follow", "latest", cwd=tmp_path) == "All runs have ended\n", "again"
    run(script("ppo"), "--resume", folder, "--total-timesteps", 2560, cwd=tmp_path)
    again = play("--follow", folder, "--eval-episodes", 2, cwd=tmp_path)
    assert again.count("\n") == 2 and "step 2560 of 2560" in again
    assert curve_of(folder / "eval")[:-1] == curve and raw_scalars(folder)[: len(trained)] == trained
    metrics = load_runs(folder, tags=["eval/mean_return"])[0].metrics["eval/mean_return"]
    assert metrics[0].tolist() == [step for step, _ in curve_of(folder / "eval")]
    assert (np.diff(metrics[2]) > 0).all() and metrics[2][-1] < 300, "seconds of training, whenever it was evaluated"


def checkpoint(folder, step, quality):
    """A checkpoint as a torch file writes it, whose model is a number."""
    import torch

    torch.save({"agent": {"x": torch.tensor([quality])}, "global_step": step}, folder / "new.tmp")
    os.replace(folder / "new.tmp", folder / "checkpoint.pt")


def test_follows_many_runs(tmp_path, monkeypatch, capsys):
    """Stopped and begun again, beside another that follows, with a run that cannot be played and the runner at work."""
    from safetensors.numpy import load_file

    from cleanrl_utils.evaluate import main
    from cleanrl_utils.runs import follow

    one, other, bad = (write_run(tmp_path / "runs", env, 1, [1.0], ended=False) for env in ("A-v1", "B-v1", "C-v1"))
    later, asked, said = [], [], []

    def score(run_dir, model_dir):
        asked.append(run_dir)
        if run_dir == bad:
            raise ValueError("it needs a package")
        if later:
            later.pop(0)()
        x = load_file(model_dir / "model.safetensors")["x"][0]
        return np.array([x - 1, x + 1])

    def kept(folder):
        return float(load_file(folder / "best/model.safetensors")["x"][0]), curve_of(folder / "eval")

    def interrupt():
        raise KeyboardInterrupt

    checkpoint(one, 0, 5.0)
    later += [lambda: checkpoint(one, 500, 7.0), interrupt]
    with pytest.raises(KeyboardInterrupt):
        follow.follow([one], score, said.append, poll=0.001)
    assert kept(one) == (5.0, [(0, 5.0)]), "what was under way is not half there"
    later += [lambda: checkpoint(one, 1000, 6.0)]
    assert follow.follow([str(one)], score, said.append, poll=0.001) == []
    assert kept(one) == (7.0, [(0, 5.0), (500, 7.0), (1000, 6.0)])
    assert curve_of(one / "eval", "eval/std_return") == [(0, 1.0), (500, 1.0), (1000, 1.0)]
    assert curve_of(one / "best", "eval/episodic_return") == [(0, 6.0), (1, 8.0)]
    assert [line.endswith(", the best so far") for line in said] == [True, True, False]

    (bad / "checkpoint.pt").write_bytes((one / "checkpoint.pt").read_bytes())
    cell = tmp_path / "runs/.benchmark/cell"
    cell.mkdir(parents=True)
    (cell.parent / "matrix-1.json").write_text(json.dumps({"cells": [{"id": "cell"}, {"id": "failed"}]}))
    lost = write_run(tmp_path / "runs", "E-v1", 1, [], ended=False)
    (cell.parent / "failed").mkdir()
    (cell.parent / "failed/failed.json").write_text(json.dumps({"run_dir": f"runs/{lost.name}"}))
    checkpoint(other, 1000, 1.0)
    begun = []

    def begin():  # the runner begins a run when the last one has ended
        if other in asked and not begun:
            begun.append(write_run(tmp_path / "runs", "D-v1", 1, [1.0]))
            checkpoint(begun[0], 500, 3.0)
            later.append(lambda: checkpoint(begun[0], 1000, 2.0))  # all metrics are there, the last checkpoint not yet
            (cell / "done.json").touch()

    monkeypatch.setattr(follow.time, "sleep", lambda seconds: begin())
    assert follow.follow([tmp_path / "runs"], score, said.append) == [bad]
    assert kept(begun[0]) == (3.0, [(500, 3.0), (1000, 2.0)]) and kept(other) == (1.0, [(1000, 1.0)])
    assert len(kept(one)[1]) == 3, "what had ended before"
    assert f"{bad.name}: it needs a package" in said and len(asked) == len(set(asked)) + 4

    with closing(follow.Followed(other)) as held:
        checkpoint(other, 1001, 9.0)
        assert held.take() and follow.follow([other], score, said.append) == []
    assert said[-1] == f"{other.name}: another process follows this run" and len(kept(other)[1]) == 1

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code, captured.out + captured.err

    told = f"{bad.name}: ppo.py has no make_envs, which it takes to play its model\n"
    assert call("--follow", bad) == (1, f"{told}All runs have ended, 1 could not be evaluated\n")
    monkeypatch.setattr("cleanrl_utils.evaluate.follow", lambda *_, **__: interrupt())
    assert call("--follow", one) == (130, "Stopped. The same command goes on from here.\n")
    for argv in [], [one, "--follow", one], ["--follow", "none"], ["--follow", one, "--output", "x.json"]:
        code, text = call(*argv)
        assert code == 2 and text.startswith("evaluate: ") and text.count("\n") == 1


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_the_call_of_the_release_post(name, tmp_path, monkeypatch):
    """Episodes one after the other in one environment, with held-out seeds; nothing but safetensors is loaded."""
    import torch

    require("moviepy")
    from cleanrl_utils.evaluate import evaluate

    module = load(name)
    monkeypatch.chdir(tmp_path)
    envs = module.make_envs("CartPole-v1", 1)
    torch.manual_seed(0)
    model = module.QNetwork(envs) if name == "dqn" else module.Agent(envs)
    module.save_file(model.state_dict(), "model.safetensors")
    call = {"make_env": module.make_env, "env_id": "CartPole-v1", "eval_episodes": 4, "run_name": "eval"}
    call |= {"Model": type(model), "device": torch.device("cpu"), "capture_video": False}

    def play(**changes):
        return evaluate("model.safetensors", **call | changes)

    returns = play()
    assert returns == play() and len(returns) == 4, "the same seed, another result"
    assert not (tmp_path / "runs").exists()
    if name == "dqn":
        expected, env = [], gym.make("CartPole-v1")
        for i in range(4):
            (obs, _), done = env.reset(seed=2**30 + i), False
            expected.append(0.0)
            while not done:
                with torch.no_grad():
                    action = model(torch.from_numpy(obs)[None]).argmax().item()
                obs, reward, terminated, truncated, _ = env.step(action)
                expected[-1] += reward
                done = terminated or truncated
        assert play(epsilon=0) == expected and play(epsilon=0.9) != expected
        module.save_file(torch.nn.Linear(4, 5).state_dict(), "model.safetensors")
        with pytest.raises(ValueError, match="one value for each action"):
            play(Model=lambda envs: torch.nn.Linear(4, 5), epsilon=0)
    else:
        play(eval_episodes=1, capture_video=True)
        (film,) = (tmp_path / "runs/eval/videos").glob("*.mp4")
        check_film(film)

    class Malicious:
        def __reduce__(self):
            return os.mkdir, ("executed",)

    torch.save(Malicious(), "q_network.pth")
    os.replace("q_network.pth", "model.safetensors")  # under either name
    torch.save(Malicious(), "q_network.pth")
    for path in "model.safetensors", "q_network.pth":
        with pytest.raises(ValueError, match="not a safetensors file"):
            evaluate(path, **call)
    assert not (tmp_path / "executed").exists()


TWO_PLAYERS = """
import gymnasium as gym
import numpy as np
import torch

pettingzoo = None  # what the tools know games of two players by


class Games:
    def __init__(self, num_envs):
        self.num_envs, self.single_action_space = num_envs, gym.spaces.Discrete(3)

    def close(self):
        pass


def make_envs(env_id, num_envs):
    return Games(num_envs)


def load_policy(run_dir, envs, device, deterministic=False):
    action = int((run_dir / "model.safetensors").read_text())
    return lambda obs: np.full(len(obs), action)


def evaluate(policy, envs, seed):
    returns = np.zeros(envs.num_envs)
    for _ in range(4):  # who has the larger action wins, the second player twice as much
        actions = policy(np.zeros((envs.num_envs, 1)))
        others = actions.reshape(-1, 2)[:, ::-1].reshape(-1)
        returns += np.sign(actions - others) * np.tile([1, 2], envs.num_envs // 2)
    return returns
"""


def test_against_an_opponent(tmp_path):
    """The policy has one seat, in turn the first and the second; its own returns come first."""
    for name, action in (("strong", 1), ("weak", 0), ("other", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "two_players.py").write_text(TWO_PLAYERS)
        (tmp_path / name / "model.safetensors").write_text(str(action))
        args = {"env_id": "pong_v3" if name != "other" else "boxing_v2", "seed": 1}
        (tmp_path / name / "args.json").write_text(json.dumps(args))
    told = play("strong", "--episodes", 3, "--against", "weak", cwd=tmp_path)
    assert told.splitlines() == [
        *("episode 0: return [ 4. -8.]", "episode 1: return [ 8. -4.]", "episode 2: return [ 4. -8.]"),
        "Mean return of 3 episodes: [ 5.33 -6.67] +- [1.89 1.89]",
        "Against weak: 3 won, 0 lost, 0 drawn",
    ]
    assert play("weak", "--episodes", 2, "--against", "strong", cwd=tmp_path).endswith("0 won, 2 lost, 0 drawn\n")
    told = play("strong", "--episodes", 40, "--against", "random", cwd=tmp_path)
    assert len({line.partition(": ")[2] for line in told.splitlines()[:40]}) > 5, "an opponent at random varies"
    assert told == play("strong", "--episodes", 40, "--against", "random", cwd=tmp_path), "from the same seed"
    assert "other plays boxing_v2, not pong_v3" in play("strong", "--against", "other", cwd=tmp_path, code=2)
    assert "nobody is not a run with a model" in play("strong", "--against", "nobody", cwd=tmp_path, code=2)
    assert "nobody is not a run with a model" in play("--follow", "strong", "--against", "nobody", cwd=tmp_path, code=2)
    assert "leave --against out" in play("strong", "--against", "weak", "--capture-video", cwd=tmp_path, code=2)
    play("strong", "--against", "weak", "--output", "played.json", cwd=tmp_path)
    assert json.loads((tmp_path / "played.json").read_text())["against"] == "weak"
    with closing(Followed(tmp_path / "strong", "-against-weak")) as followed:
        assert followed.take() and (tmp_path / "strong/eval-against-weak").is_dir(), "each opponent has its own curve"
