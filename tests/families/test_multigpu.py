"""Several processes of ppo_atari_multigpu.py learn as one with all their environments would, and stop together."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from helpers.files import posix, require_for, script, smoke
from helpers.processes import environment, inspect_run, private_network, run_dir, start
from helpers.scalars import raw_scalars, steps

NAME = "ppo_atari_multigpu"
ARGV = ["--num-steps", 8, "--num-minibatches", 4, "--env-id", "PongNoFrameskip-v4"]


STORES = []  # kept open, each at a port of its own, until the tests end


def ranks(world_size):
    """The environments of the processes that torchrun would start on this machine, with a store for them to meet."""
    import torch.distributed as dist

    STORES.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": STORES[-1].port, "TORCHELASTIC_USE_AGENT_STORE": True}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    own = [{"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
    return [{key: str(value) for key, value in (shared | numbers).items()} for numbers in own]


AS_RANK = """
import os
import runpy
import sys

os.environ.update({env})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_all(world_size, *argv, cwd):
    return [start(script(NAME), *argv, cwd=cwd, driver=AS_RANK.format(env=env)) for env in ranks(world_size)]


def end_of(processes):
    """What each has printed, and the exit codes."""
    outputs = [process.communicate(timeout=120) for process in processes]
    return outputs, [process.returncode for process in processes]


SAME_CHANCE = """
import os
import torch

os.environ.update(RANK)

torch.set_default_dtype(torch.float64)  # rounding must not turn a draw between two actions
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
draws, shuffles = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
exponential, randperm = torch.Tensor.exponential_, torch.randperm


def exponential_of_this_process(tensor):
    noise = exponential(torch.empty(8, *tensor.shape[1:]), generator=draws)
    return tensor.copy_(noise.chunk(world_size)[rank])


def shuffle_of_this_process(n, device):
    half = randperm(4 * 8, generator=shuffles)  # step * 4 + environment
    if world_size == 2:
        return half
    step, env = half.view(4, -1) // 4, half.view(4, -1) % 4  # minibatches are made of those of the two
    return torch.cat([step * 8 + env, step * 8 + 4 + env], 1).flatten()


torch.Tensor.exponential_, torch.randperm = exponential_of_this_process, shuffle_of_this_process
"""
LEARNED = """
result |= {"weights": weights.detach().numpy(), "epochs": epoch + 1, "obs": obs, "actions": actions}
"""


@pytest.mark.parametrize("flags", [[], ["--target-kl", "1e-5", "--no-norm-adv", "--max-grad-norm", "0.01"]])
def test_two_processes_equal_one_with_twice_the_environments(flags, tmp_path):
    """Given the same draws and shuffles. With a target for the KL, all take the same decision to stop."""
    require_for(NAME)
    argv = [*ARGV, "--total-timesteps", 2 * 8 * 8, "--learning-rate", 0.0005, *flags]
    results = {}
    for world_size, envs in ((1, 8), (2, 4)):
        folders = [tmp_path / f"{world_size}-{rank}" for rank in range(world_size)]
        for folder in folders:
            folder.mkdir()
        with ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(
                    inspect_run, script(NAME), *argv, "--local-num-envs", envs,
                    cwd=cwd, before=SAME_CHANCE.replace("RANK", repr(env), 1), after=LEARNED,
                )
                for cwd, env in zip(folders, ranks(world_size))
            ]  # fmt: skip
            results[world_size] = [job.result() for job in jobs]
        assert not any((folder / "runs").exists() for folder in folders[1:]), "only process 0 writes"
    (one,), two = results[1], results[2]

    for key, axis in (("obs", 1), ("actions", 1)):  # seeds: games 4 to 7 are those of the second process
        np.testing.assert_array_equal(np.concatenate([part[key] for part in two], axis), one[key])
    assert not np.array_equal(two[0]["obs"], two[1]["obs"])
    np.testing.assert_array_equal(two[0]["weights"], two[1]["weights"])
    np.testing.assert_allclose(two[0]["weights"], one["weights"], atol=1e-6)
    assert two[0]["epochs"] == two[1]["epochs"] == one["epochs"]
    assert (one["epochs"] < 4) == ("--target-kl" in flags)
    logged = [raw_scalars(run_dir(tmp_path / folder)) for folder in ("1-0", "2-0")]
    for first, second in zip(*logged, strict=True):
        assert first[:2] == second[:2]
        if "SPS" not in first[0]:
            assert first[2] == pytest.approx(second[2], rel=1e-3, abs=1e-5), first[0]


@posix
def test_stop_and_resume_together(tmp_path):
    """The signal reaches one process only, as it may when a machine of several is taken away."""
    require_for(NAME)
    argv = [*ARGV, "--local-num-envs", 2, "--update-epochs", 1, "--checkpoint-freq", 32]
    processes = start_all(2, *argv, cwd=tmp_path)
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    outputs, codes = end_of(processes)
    assert codes == [75, 75], outputs
    assert "Stopped at step" in outputs[0][0] and not outputs[1][0], "process 0 speaks for all"
    stopped = raw_scalars(run_dir(tmp_path))
    torch = pytest.importorskip("torch")
    states = torch.load(run_dir(tmp_path) / "checkpoint.pt")["torch_rng"]
    draws = [torch.rand(8, generator=torch.Generator().set_state(state)) for (state,) in states]
    assert not torch.equal(*draws), "both processes draw the same actions and shuffles"

    resume = ["--resume", run_dir(tmp_path), "--total-timesteps", steps(stopped)["losses/value_loss"][-1] + 2 * 32]
    ((_, stderr),), codes = end_of(start_all(1, *resume, cwd=tmp_path))
    assert codes == [2] and stderr.strip().endswith("with 2 processes, not 1") and "Traceback" not in stderr
    outputs, codes = end_of(start_all(2, *resume, cwd=tmp_path))
    assert codes == [0, 0], outputs
    scalars = raw_scalars(run_dir(tmp_path))
    assert scalars[: len(stopped)] == stopped
    assert np.diff(steps(scalars)["losses/value_loss"]).tolist()[-2:] == [32, 32]


def test_a_wrong_flag_ends_all(tmp_path):
    require_for(NAME)
    outputs, codes = end_of(start_all(2, "--num-minibatches", 3, cwd=tmp_path))
    assert codes == [2, 2] and "--num-minibatches must divide" in outputs[0][1]
    outputs, codes = end_of(start_all(2, "--num-envs", 3, cwd=tmp_path))
    assert codes == [2, 2] and "--num-envs must be a multiple of the 2 processes" in outputs[0][1]
    assert not (tmp_path / "runs").exists()


def test_torchrun(tmp_path):
    """The command of the docstring."""
    require_for(NAME)
    env = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    if not private_network():
        env.pop("GLOO_SOCKET_IFNAME")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    argv = smoke(NAME, local_num_envs=None, num_envs=4, num_steps=16, total_timesteps=128)
    command = [*private_network(), sys.executable, *map(str, [*launch, script(NAME), *argv])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensorboard --logdir") == 1
    scalars = raw_scalars(run_dir(tmp_path))
    assert steps(scalars)["losses/value_loss"] == [64, 128]
