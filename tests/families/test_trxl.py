"""The Transformer-XL memory: a network in NumPy with loops, which plays each episode from its first step on and keeps
lists of what it has seen, has to find what ppo_trxl.py computes in batches from windows of one array.
"""

import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from helpers.files import load, require, require_for, script, smoke
from helpers.oracles import FOLLOW, advantages_of_episode
from helpers.processes import inspect_runs, run
from helpers.refusals import refuse, refuse_all, without
from helpers.scalars import raw_scalars

torch = pytest.importorskip("torch")
NAME = "ppo_trxl"
ENCODINGS = ["", "none", "absolute", "learned"]
SMALL = "--trxl-num-layers 1 --trxl-num-heads 2 --trxl-dim 32"


def make_args(**changes):
    sizes = {"trxl_num_layers": 2, "trxl_num_heads": 2, "trxl_dim": 8, "trxl_memory_length": 4}
    return load(NAME).Args(**sizes | changes)


def make_agent(args, nvec=(3, 2)):
    torch.manual_seed(0)
    spaces = {"single_observation_space": gym.spaces.Box(-1, 1, (3,)), "num_envs": 3}
    envs = SimpleNamespace(**spaces, single_action_space=gym.spaces.MultiDiscrete(nvec))
    agent = load(NAME).Agent(envs, args)
    with torch.no_grad():
        for param in agent.parameters():
            param.add_(0.3 * torch.randn_like(param))  # biases too
    return agent, envs


def normalize(x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


class Oracle:
    """The network of a state_dict, one observation at a time; `past` has rows, one per layer, for each step before."""

    def __init__(self, state, args):
        self.w, self.args = {key: np.asarray(value, dtype=float) for key, value in state.items()}, args

    def linear(self, name, x):
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def attend(self, name, x, window):
        keys, values = self.w[f"{name}.keys"], self.w[f"{name}.values"]
        size, heads = keys.shape[1], []
        query = self.linear(f"{name}.queries", x)
        for h in range(len(keys)):
            q = query[h * size : (h + 1) * size]
            scores = [q @ (keys[h] @ row) / np.sqrt(size) for row in window]
            parts = [np.exp(score - max(scores)) for score in scores]
            head = np.zeros(size)
            for part, row in zip(parts, window, strict=True):
                head += part / sum(parts) * (values[h] @ row)
            heads.append(head)
        return self.linear(f"{name}.out", np.concatenate(heads))

    def __call__(self, obs, past):
        """(hidden, value, logits by dimension, what is kept) of a step."""
        length, encoding = self.args["trxl_memory_length"], self.args["trxl_positional_encoding"]
        x, rows = self.linear("encoder", np.asarray(obs, dtype=float)), []
        for i in range(self.args["trxl_num_layers"]):
            y = normalize(x)
            row = y.copy()
            if encoding == "absolute":
                half = len(x) // 2
                for k in range(half):
                    angle = len(past) / 10_000 ** (2 * k / len(x))
                    row[k] += np.sin(angle)
                    row[half + k] += np.cos(angle)
            rows.append(row)
            window = [kept[i] for kept in past[-length:]]
            if encoding == "learned":
                window = [kept + self.w["codes"][length - len(window) + j, 0] for j, kept in enumerate(window)]
            x = x + self.attend(f"attentions.{i}", y, window)
            x = x + np.maximum(self.linear(f"projections.{i}", normalize(x)), 0)
        hidden = np.maximum(self.linear("network.0", x), 0)
        branches = sum(key.startswith("actor") for key in self.w) // 2
        logits = [self.linear(f"actor.{k}", hidden) for k in range(branches)]
        return hidden, self.linear("critic", hidden)[0], logits, rows


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@torch.no_grad()
def test_attention_is_that_of_loops_over_heads():
    torch.manual_seed(0)
    attention = load(NAME).Attention(12, 3)
    attention.out.bias.normal_()
    x, window, mask = torch.randn(6, 12), torch.randn(6, 5, 12), torch.rand(6, 5) < 0.6
    mask[0], mask[1] = False, True
    oracle = Oracle({f"a.{key}": value for key, value in attention.state_dict().items()}, {})
    expected = [oracle.attend("a", *pair) for pair in zip(x.numpy(), [w[m].numpy() for w, m in zip(window, mask)])]
    result = attention(x, window, mask)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result[0], attention.out.bias)  # nothing to attend to
    window[~mask] = 1e3  # nor does it matter what is hidden
    torch.testing.assert_close(attention(x, window, mask), result)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_policy_value_and_memory_of_single_steps(encoding):
    """Episodes of all ages in one batch, the rest of each window being of another episode."""
    args = make_args(trxl_positional_encoding=encoding)
    agent, _ = make_agent(args)
    oracle, rng = Oracle(agent.state_dict(), vars(args)), np.random.default_rng(0)
    obs, past, batch = rng.normal(size=(7, 3)).astype(np.float32), [], []
    windows = rng.normal(size=(7, 4, 2, 8)).astype(np.float32)  # 4 steps, 2 layers
    for t in range(7):
        for age, kept in enumerate(reversed(past[-4:])):
            windows[t, 3 - age] = kept
        hidden, value, logits, kept = oracle(obs[t], past)
        batch.append((hidden, value, logits, kept))
        past.append(kept)
    inputs = torch.tensor(obs), torch.tensor(windows), torch.arange(7)
    hidden, kept = agent(*inputs)
    close = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(hidden, [row[0] for row in batch], **close)
    np.testing.assert_allclose(kept, [row[3] for row in batch], **close)
    np.testing.assert_allclose(agent.get_value(*inputs), [row[1] for row in batch], **close)
    actions = torch.tensor(rng.integers([3, 2], size=(7, 2)))
    logprob, entropy, value, _ = agent.evaluate(inputs[0], actions, *inputs[1:])
    policies = [[log_softmax(x) for x in row[2]] for row in batch]
    chosen = [sum(x[a] for x, a in zip(row, action)) for row, action in zip(policies, actions.numpy(), strict=True)]
    np.testing.assert_allclose(logprob, chosen, **close)
    np.testing.assert_allclose(entropy, [-sum((np.exp(x) * x).sum() for x in row) for row in policies], **close)
    np.testing.assert_allclose(value, [row[1] for row in batch], **close)


@torch.no_grad()
def test_drawn_actions_follow_each_branch():
    agent, _ = make_agent(make_args())
    draws, logits = 40_000, [torch.tensor([0.5, -1.0, 1.5]), torch.tensor([0.3, -0.9])]
    for branch, bias in zip(agent.actor, logits, strict=True):
        branch.weight.zero_()
        branch.bias.copy_(bias)
    inputs = torch.randn(draws, 3), torch.zeros(draws, 4, 2, 8), torch.zeros(draws, dtype=torch.long)
    actions, _ = agent.get_action(*inputs)
    assert actions.shape == (draws, 2)
    assert (agent.get_action(*inputs, deterministic=True)[0] == torch.tensor([2, 0])).all(), "not the likeliest"
    for i, bias in enumerate(logits):
        shares = actions[:, i].bincount(minlength=len(bias)) / draws
        torch.testing.assert_close(shares, bias.softmax(0), rtol=0, atol=0.012)
    joint = ((actions[:, 0] == 2) & (actions[:, 1] == 0)).float().mean()
    torch.testing.assert_close(joint, logits[0].softmax(0)[2] * logits[1].softmax(0)[0], rtol=0, atol=0.012)


@torch.no_grad()
def test_a_loaded_policy_remembers_its_episode_only(tmp_path):
    module, args = load(NAME), make_args(trxl_positional_encoding="learned")
    agent, envs = make_agent(args)
    (tmp_path / "args.json").write_text(json.dumps(vars(args)))
    module.save_file(agent.state_dict(), tmp_path / "model.safetensors")
    policy, rng, past = module.load_policy(tmp_path, envs, "cpu"), np.random.default_rng(1), [[], [], []]
    oracle, starts = Oracle(agent.state_dict(), vars(args)), np.random.default_rng(2).random((16, 3)) < 0.15
    starts[0] = True
    for t in range(16):
        obs, envs.starts = rng.normal(size=(3, 3)).astype(np.float32), starts[t]
        past = [[] if start else list(rows) for start, rows in zip(starts[t], past)]
        steps = [oracle(x, rows) for x, rows in zip(obs, past, strict=True)]
        torch.manual_seed(t)
        actions = policy(obs)
        torch.manual_seed(t)
        logits = [torch.tensor(np.stack([step[2][k] for step in steps]), dtype=torch.float32) for k in range(2)]
        drawn = [(x - torch.empty_like(x).exponential_().log()).argmax(-1) for x in logits]
        np.testing.assert_array_equal(actions, torch.stack(drawn, dim=1))
        for rows, step in zip(past, steps, strict=True):
            rows.append(step[3])


AFTER = """
result["agents"] = {v: {k: x.numpy() for k, x in a.state_dict().items()} for v, a in result["agents"].items()}
result |= {"args": vars(args), "final_values": final_values, "advantages": advantages, "elapsed": elapsed}
result |= {"values": b_values.numpy(), "logprobs": b_logprobs.numpy(), "kl": [old_approx_kl.item(), approx_kl.item()]}
"""
RUN = "--env-id probe_envs:OwnChoices-v0 --num-envs 3 --num-steps 10 --num-minibatches 1 --update-epochs 1 "
RUN += "--total-timesteps 90 --trxl-num-layers 2 --trxl-num-heads 2 --trxl-dim 8 "
RUN += "--anneal-steps 60 --init-lr 0.03 --final-lr 0.01 --init-ent-coef 0.4 --final-ent-coef 0.2"


def test_a_run_learns_from_what_it_acted_on(tmp_path):
    """The third rollout goes on with episodes of the second, whose rows are of other weights; windows are shorter than
    an episode, or longer than a rollout. The one minibatch of its one epoch has the ratio one."""
    require_for(NAME)
    patched = "step, reset, init = kind.step, kind.reset, kind.__init__"
    assert patched in FOLLOW
    once = f"kind.plain = getattr(kind, 'plain', {patched.split(' = ')[1].join('()')})\nstep, reset, init = kind.plain"
    follow = FOLLOW.replace(patched, once).replace("OPTIONS", "{}")  # several runs in one process
    follow = follow.replace("CLASS_MODULE", "gymnasium.vector").replace("CLASS", "SyncVectorEnv")
    cases = [(4, "absolute"), (13, "learned"), (6, "")]
    argvs = [
        [*RUN.split(), "--trxl-memory-length", length, "--trxl-positional-encoding", encoding, "--seed", length]
        for length, encoding in cases
    ]
    for got in inspect_runs(script(NAME), argvs, cwd=tmp_path, before=follow, after=AFTER):
        compare_run(got)
    folders = list((tmp_path / "runs").iterdir())
    for folder in folders:
        check_log(raw_scalars(folder))
    run(script(NAME), "--resume", folders[0], "--total-timesteps", 120, cwd=tmp_path)
    assert check_means(raw_scalars(folders[0])) == [30, 60, 90, 120], "the mean forgets the episodes before a resume"


def check_log(scalars):
    """Step size and entropy bonus decay to their final values."""
    expected = {"charts/learning_rate": [0.03, 0.02, 0.01], "charts/entropy_coefficient": [0.4, 0.3, 0.2]}
    for tag, values in expected.items():
        assert [value for key, _, value in scalars if key == tag] == pytest.approx(values)
    check_means(scalars)


def check_means(scalars):
    """Means are of the last 100 episodes; returns the steps at which they are logged."""
    lengths = [(step, value) for tag, step, value in scalars if tag == "charts/episodic_length"]
    for tag in ("episode/l_mean", "episode/time_mean"):  # ours, and what the environment reports
        means = [(step, value) for key, step, value in scalars if key == tag]
        assert means
        for step, mean in means:
            assert mean == pytest.approx(np.mean([value for at, value in lengths if at <= step][-100:]), rel=1e-5)
    return [step for step, _ in means]


class Reports(gym.Env):
    """One step, whose info is of all kinds."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action):
        info = {"success": True, "episode": {"r": 1.0}, "name": "track", "path": [1, 2]}
        return np.zeros(1, dtype=np.float32), 1.0, bool(action), False, info


def test_numbers_of_an_info():
    envs = load(NAME).SyncWithStarts([Reports] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs.reset(seed=1)
    *_, infos = envs.step(np.array([0, 1]))
    assert load(NAME).numbers(infos, 1) == {"success": True}


def compare_run(got):
    oracles = {version: Oracle(state, got["args"]) for version, state in got["agents"].items()}
    past, rows, stream = [[], [], []], [], got["stream"]
    for before, (action, reward, terminated, truncated, final, version) in zip(stream[::2], stream[1::2]):
        row = []
        for i in range(3):
            _, value, logits, kept = oracles[version](before[i], past[i])
            elapsed = len(past[i])
            past[i] = [*past[i], kept]
            _, following, _, _ = oracles[version](final[i], past[i])  # of the next observation, or the final one
            logprob = sum(log_softmax(x)[a] for x, a in zip(logits, action[i]))
            end = "terminated" if terminated[i] else "truncated" if truncated[i] else "no"
            row.append((value, logprob, reward[i], end, following, elapsed))
            past[i] = past[i] if end == "no" else []
        rows.append(row)
    assert len(rows) == 30
    columns = (np.array([[row[i][k] for i in range(3)] for row in rows[20:]]) for k in range(6))
    values, logprobs, rewards, end, following, elapsed = columns
    close = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_array_equal(got["elapsed"], elapsed)
    assert (elapsed > np.arange(10)[:, None]).any(), "no episode goes on from the rollout before"
    np.testing.assert_allclose(got["values"].reshape(10, 3), values, **close)
    np.testing.assert_allclose(got["logprobs"].reshape(10, 3), logprobs, **close)
    np.testing.assert_allclose(got["final_values"], np.where(end == "truncated", following, 0), **close)
    np.testing.assert_allclose(got["kl"], 0, rtol=0, atol=1e-6)
    expected = np.zeros((10, 3))
    for i in range(3):
        start = 0
        for t in range(10):
            if end[t, i] != "no" or t == 9:
                last, part = 0.0 if end[t, i] == "terminated" else following[t, i], slice(start, t + 1)
                rest = last, got["args"]["gamma"], got["args"]["gae_lambda"]
                expected[part, i] = advantages_of_episode(rewards[part, i], values[part, i], *rest)
                start = t + 1
    np.testing.assert_allclose(got["advantages"], expected, **close)


RECONSTRUCT = """
if args.reconstruction_coef:
    with torch.no_grad():
        _, _, _, hidden = agent.evaluate(b_obs[inds], b_actions[inds], windows(inds), b_elapsed[inds])
        decoded = agent.decoder(hidden).numpy().astype(float)
    result["decoded"], result["seen"] = decoded, b_obs[inds].numpy()
    logged = {key: x.item() for key, x in update(inds).items()}
    result |= {key: logged[key] for key in ("loss", "reconstruction_loss")}
    result["rest"] = logged["policy_loss"] - ent_coef.item() * logged["entropy"] + args.vf_coef * logged["value_loss"]
result |= {"actions": actions.shape, "lengths": elapsed.max() + 1, "env_id": args.env_id}
"""


def test_environments_with_images(tmp_path):
    """MiniGrid, and an action of two dimensions in Memory Gym; the latter learns to reconstruct what it sees."""
    flags = "--update-epochs 2 --total-timesteps 512 --save-model --init-lr 0.003".split()
    cases = [["--env-id", "MiniGrid-MemoryS9-v0"], ["--env-id", "SearingSpotlights-v0", "--reconstruction-coef", 0.5]]
    argvs = [[*smoke(NAME, total_timesteps=None, update_epochs=None), *flags, *case] for case in cases]
    maze, spots = inspect_runs(script(NAME), argvs, cwd=tmp_path, after=RECONSTRUCT)
    assert maze["actions"] == (64, 2) and spots["actions"] == (64, 2, 2)
    assert maze["lengths"] <= 96

    x, y = spots["decoded"], spots["seen"].transpose(0, 3, 1, 2) / 255
    assert x.shape == y.shape == (32, 3, 84, 84)
    expected = np.mean(y * np.log1p(np.exp(-x)) + (1 - y) * np.log1p(np.exp(x)))
    assert spots["reconstruction_loss"] == pytest.approx(expected, rel=1e-4)
    assert spots["loss"] == pytest.approx(spots["rest"] + 0.5 * expected, rel=1e-4)
    (folder,) = (tmp_path / "runs").glob("Searing*")
    losses = [value for tag, _, value in raw_scalars(folder) if tag == "losses/reconstruction_loss"]
    assert losses[-1] < 0.8 * losses[0]


def test_minigrid_is_seen_in_images_and_cut_off_after_96_steps():
    require("minigrid")
    envs = load(NAME).make_envs("MiniGrid-MemoryS9-v0", 2)
    assert envs.single_observation_space.shape == (84, 84, 3)
    envs.reset(seed=1)
    for step in range(96):
        obs, _, terminated, truncated, _ = envs.step(np.zeros(2, dtype=np.int64))  # turn on the spot
        assert obs.dtype == np.uint8 and not terminated.any() and truncated.all() == (step == 95)
    assert envs.starts.all()


def test_environments_of_memory_gym_share_a_screen_but_no_pixels():
    """pygame has one display for all; each environment still sees its own world, as if it were alone."""
    require("memory_gym")
    module, actions = load(NAME), np.random.default_rng(0).integers(4, size=(30, 2))
    together, alone = module.make_envs("MysteryPath-Grid-v0", 2), module.make_envs("MysteryPath-Grid-v0", 1)
    frames = [together.reset(seed=5)[0].copy(), *(together.step(action)[0].copy() for action in actions)]
    assert (frames[-1][0] != frames[-1][1]).any()
    other = [alone.reset(seed=6)[0].copy(), *(alone.step(action[1:])[0].copy() for action in actions)]
    np.testing.assert_array_equal(np.array(frames)[:, 1], np.array(other)[:, 0])


def test_what_it_refuses(tmp_path, monkeypatch):
    cases = [["--env-id", "MortarMayhemB-v0"], ["--env-id", "CartPole-v1", "--reconstruction-coef", 0.1]]
    images, vectors = refuse_all(NAME, cases, tmp_path)
    assert "84 x 84 x 3" in images
    assert "--reconstruction-coef" in vectors
    line = refuse(NAME, cwd=tmp_path, driver=without("memory_gym"))
    assert "pip install --no-deps memory-gym==" in line
    monkeypatch.setattr(load(NAME), "memory_gym", None)
    with pytest.raises(ImportError, match="pip install pygame-ce minigrid && "):
        load(NAME).make_envs("MiniGrid-MemoryS9-v0", 1)
    load(NAME).make_envs("CartPole-v1", 1)


TRACK = "--total-timesteps 30720 --num-envs 16 --num-steps 64 --num-minibatches 4 --update-epochs 3 --norm-adv "
TRACK += "--gamma 0.99"
TRXL = f"{SMALL} --init-lr 0.003 --final-lr 0.0003 --anneal-steps 30720 --init-ent-coef 0.01"


@pytest.mark.slow
def test_proof_of_memory(tmp_path):
    """Solved with a memory that reaches back to the goals; a shorter one does no better than chance, nor does none."""
    require_for(NAME)
    delayed, track = "proof_of_memory:ProofofMemoryDelayed-v0", "proof_of_memory:ProofofMemory-v0"
    lengths = [8, 1]
    flags = f"{TRACK} {TRXL} --env-id {delayed} --save-model"
    argvs = [[*f"{flags} --trxl-memory-length {length}".split()] for length in lengths]
    inspect_runs(script(NAME), argvs, cwd=tmp_path)
    run(script("ppo"), *f"{TRACK} --learning-rate 0.003 --env-id {track}".split(), cwd=tmp_path)
    means, evaluated = {}, {}
    for folder in (tmp_path / "runs").iterdir():
        args, scalars = json.loads((folder / "args.json").read_text()), raw_scalars(folder)
        length = args.get("trxl_memory_length", 0)
        means[length] = np.mean([value for tag, _, value in scalars if tag == "charts/episodic_return"][-100:])
        evaluated[length] = [value for tag, _, value in scalars if tag == "eval/episodic_return"]
    assert means[8] > 0.9
    assert len(evaluated[8]) == 10 and np.mean(evaluated[8]) > 0.7, "the saved policy has forgotten how to remember"
    assert means[1] < -0.3  # no better than -1 on average, of 100 episodes with a deviation of 2
    assert means[0] < 0  # -0.6, with 1.6


def test_the_track_by_hand():
    import proof_of_memory  # noqa: F401

    for env_id, frozen in (("ProofofMemory-v0", 2), ("ProofofMemoryDelayed-v0", 6)):
        env, returns = gym.make(env_id), {}
        for seed in range(20):
            for knows in (True, False):
                obs, _ = env.reset(seed=seed)
                goal, total, seen = obs[2], 0, [obs]
                assert obs.tolist() == [-goal, 0, goal] and abs(goal) == 1
                for t in range(frozen + 5):
                    obs, reward, terminated, truncated, _ = env.step(int((goal if knows else 1) > 0))
                    total += reward
                    seen.append(obs)
                    assert terminated == (t == frozen + 4) and not truncated
                assert [abs(x[2]) for x in seen] == [1, 1] + [0] * (frozen + 4)
                assert [x[1] for x in seen[: frozen + 1]] == [0] * (frozen + 1)
                returns.setdefault(knows, []).append(total)
        assert returns[True] == pytest.approx([1] * 20)
        assert sorted(set(np.round(returns[False], 6))) == pytest.approx([1 - 2 * (1 + 0.1 * (frozen + 4)), 1])
        env.reset(seed=1)
        for t in range(16):  # back and forth
            *_, terminated, truncated, _ = env.step(t % 2)
        assert truncated and not terminated
