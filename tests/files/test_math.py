"""The equations of the files against slow, obvious oracles, and the losses of the main blocks against a second text."""

import math

import numpy as np
import pytest

from helpers.files import (
    LINEAGE,
    continuous_envs,
    defines,
    discrete_envs,
    each,
    family,
    learns_first,
    load,
    require_for,
    script,
    smoke,
    step_sizes,
    uses,
)
from helpers.oracles import (
    FOLLOW_TRANSITIONS,
    UPDATE_ONCE_MORE,
    advantages_of_episode,
    compare_losses,
    first_ratio_then,
    slow_projection,
)
from helpers.processes import inspect_run, inspect_runs

torch = pytest.importorskip("torch")


@each(lambda name: defines(name, "def gae("))
@pytest.mark.parametrize("seed", range(5))
def test_gae(name, seed):
    rng = np.random.default_rng(seed)
    num_steps, num_envs, gamma, gae_lambda = 40, 3, 0.97, 0.9
    rewards, values, final = rng.normal(size=(3, num_steps, num_envs)).astype(np.float32)
    next_value = rng.normal(size=num_envs).astype(np.float32)
    end = rng.choice(["no", "terminated", "truncated"], p=[0.7, 0.15, 0.15], size=(num_steps, num_envs))
    end[-1] = ["no", "terminated", "truncated"]  # every way in which a rollout can end
    final = np.where(end == "truncated", final, 0).astype(np.float32)

    expected = np.zeros_like(rewards)
    for env in range(num_envs):
        start = 0
        for t in range(num_steps):
            if end[t, env] != "no" or t == num_steps - 1:
                last = {"terminated": 0.0, "truncated": final[t, env], "no": next_value[env]}[end[t, env]]
                part = slice(start, t + 1)
                stretch = advantages_of_episode(rewards[part, env], values[part, env], last, gamma, gae_lambda)
                expected[part, env] = stretch
                start = t + 1
    dones = (end != "no").astype(np.float32)
    result = load(name).gae(rewards.copy(), values, next_value, dones, final, gamma, gae_lambda)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_the_gae_oracle_by_hand():
    """Two steps, rewards 1 and 2, values 10 and 20, then 30: deltas 1 + 10 - 10 and 2 + 15 - 20 at gamma 1/2."""
    assert advantages_of_episode([1, 2], [10, 20], 30, 0.5, 0.5) == [1 + 0.25 * -3, -3]


def masked(name):
    return defines(name, "class MaskFirst") or uses(name, "godot_rl")  # see test_masked.py and test_godot.py


@each(lambda name: defines(name, "class Agent", ".exponential_().log()", "nn.Linear(inputs") and not masked(name))
def test_discrete_actions_follow_the_softmax(name):
    torch.manual_seed(0)
    agent = load(name).Agent(discrete_envs(num_actions=4))
    logits = torch.tensor([0.5, -1.0, 1.5, 0.0])
    last = list(agent.actor)[-1]
    last.weight.data.zero_()
    last.bias.data.copy_(logits)
    draws = 200_000
    counts = agent.get_action(torch.zeros(draws, 4)).bincount(minlength=4).double()
    expected = draws * logits.double().softmax(0)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.3  # the 99.9 % quantile with 3 degrees of freedom
    assert (agent.get_action(torch.zeros(100, 4), deterministic=True) == 2).all(), "not the likeliest"


@each(lambda name: defines(name, "actor_logstd") and not (defines(name, "self.hidden_gates") or masked(name)))
def test_continuous_actions_follow_the_gaussian(name):
    torch.manual_seed(0)
    agent = load(name).Agent(continuous_envs())
    agent.actor_logstd.data.copy_(torch.tensor([0.5, -1.0, 0.0]))
    obs = torch.randn(1, 4)
    actions = agent.get_action(obs.expand(200_000, 4)).detach()
    normalized = agent.normalize(obs) if hasattr(agent, "normalize") else obs
    mean, std = agent.actor_mean(normalized).detach()[0], agent.actor_logstd.exp().detach()
    torch.testing.assert_close(actions.mean(0), mean, rtol=0, atol=0.02)
    torch.testing.assert_close(actions.std(0), std, rtol=0.02, atol=0)
    correlation = torch.corrcoef(actions.T) - torch.eye(3)
    assert correlation.abs().max() < 0.02, "dimensions share their noise"
    torch.testing.assert_close(agent.get_action(obs, deterministic=True).detach()[0], mean)


@each(
    lambda name: (
        defines(name, "class Agent", "def evaluate", "def get_value(self, obs)", "nn.Linear(inputs")
        and not masked(name)
    )
)
def test_log_probabilities_and_entropy(name):
    torch.manual_seed(0)
    obs = torch.randn(50, 4)
    if "actor_logstd" in script(name).read_text():
        agent = load(name).Agent(continuous_envs())
        agent.actor_logstd.data.copy_(torch.tensor([0.3, -0.7, 0.1]))
        actions, x = torch.randn(50, 3), obs
        if hasattr(agent, "obs_rms"):
            agent.obs_rms.update(torch.randn(100, 4) * 3 + 1)
            x = ((obs - agent.obs_rms.mean) / agent.obs_rms.std).clamp(-10, 10)
        mean = agent.actor_mean(x)
        policy = torch.distributions.Normal(mean, agent.actor_logstd.exp())
        logprob, entropy = policy.log_prob(actions).sum(1), policy.entropy().sum(1)
    else:
        agent = load(name).Agent(discrete_envs())
        agent.actor[-1].weight.data.mul_(100)  # away from the uniform start
        actions = torch.randint(3, (50,))
        policy = torch.distributions.Categorical(logits=agent.actor(obs))
        logprob, entropy = policy.log_prob(actions), policy.entropy()
    result = agent.evaluate(obs, actions)
    torch.testing.assert_close(result[0], logprob)
    torch.testing.assert_close(result[1], entropy)
    torch.testing.assert_close(result[2], agent.get_value(obs))


@each(lambda name: defines(name, "def flatten("))
def test_flatten_keeps_values_and_gradients(name):
    """Adam on the one vector, with a clipped norm, moves the module as Adam on its parameters does."""
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))  # noqa: E731
    plain, flat = make(), make()
    flat.load_state_dict(plain.state_dict())
    vector = load(name).flatten(flat)
    assert vector.numel() == sum(param.numel() for param in plain.parameters())
    optimizers = [torch.optim.Adam(plain.parameters(), 0.01), torch.optim.Adam([vector], 0.01)]
    for _ in range(10):
        x, y = torch.randn(8, 3), torch.randn(8, 2)
        plain.zero_grad()
        vector.grad.zero_()
        for module in (plain, flat):
            ((module(x) - y) ** 2).mean().backward()
        for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        norms = [torch.nn.utils.clip_grad_norm_(params, 0.1) for params in (plain.parameters(), [vector])]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.data.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


# The main block of the PPO files

# RND, with values of two kinds: test_rnd.py
is_ppo = each(lambda name: family(name) == "ppo" and uses(name, "torch") and not defines(name, "int_coef"))


def without_noise(name):
    """RPO moves the means that it scores actions under, and with them the first ratio; without noise it is PPO."""
    return ["--rpo-alpha", 0] if defines(name, "rpo_alpha") else []


def share_of_value_error(name):
    return 0.5 if defines(name, "v_loss = 0.5 * ") else 1.0


@is_ppo
def test_first_ratio_and_losses(name, tmp_path):
    """The second rollout is acted with updated weights and normalisers; its one minibatch still has ratio one.

    Then, after large steps, where ratios and values are clipped, two more updates against the formulas in NumPy.
    """
    require_for(name)
    coefs = {"init_ent_coef": 0.03, "final_ent_coef": 0.03} if defines(name, "init_ent_coef") else {"ent_coef": 0.03}
    envs = "local_num_envs" if defines(name, "local_num_envs: int") else "num_envs"
    sizes = {} if uses(name, "godot_rl") else {envs: 4, "num_steps": 16, "total_timesteps": 2 * 4 * 16}
    argv = smoke(name, update_epochs=1, num_minibatches=1, **sizes, **step_sizes(name, 0.01), **coefs, vf_coef=0.7)
    argv += ["--max-grad-norm", 0.01, *without_noise(name)] + ["--no-anneal-lr"] * defines(name, "anneal_lr: bool")
    argv += ["--norm-adv", "--clip-vloss"]
    result = inspect_run(script(name), *argv, cwd=tmp_path, after=first_ratio_then(UPDATE_ONCE_MORE))
    assert result["iteration"] >= 1
    advantages, returns, values = result["b"]
    assert result["pg_loss"] == pytest.approx(0, abs=1e-5)  # advantages are standardised, so their mean is zero
    assert result["approx_kl"] == pytest.approx(0, abs=1e-6)  # the mean of ratio - 1 - log ratio, which is at least 0
    assert result["old_approx_kl"] == pytest.approx(0, abs=1e-5)
    assert result["v_loss"] == pytest.approx(share_of_value_error(name) * np.mean((values - returns) ** 2), rel=1e-3)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-4, atol=1e-4)
    for switches, got in zip(([], ["--no-clip-vloss", "--no-norm-adv"]), result["cases"], strict=True):
        compare_losses(got, switches, share_of_value_error(name))


# Normalisers

has_normalisers = each(lambda name: defines(name, "class RunningMeanStd"))


@has_normalisers
def test_running_mean_and_std(name):
    torch.manual_seed(0)
    stream = torch.randn(1000, 3) * torch.tensor([0.1, 1.0, 50.0]) + torch.tensor([3.0, 0.0, -100.0])
    statistics = load(name).RunningMeanStd(3)
    for part in stream.split([1, 9, 490, 500]):
        statistics.update(part)
    np.testing.assert_allclose(statistics.mean, stream.double().numpy().mean(0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(statistics.std, stream.double().numpy().std(0), rtol=1e-3)
    assert set(statistics.state_dict()) >= {"mean", "std", "count"}, "not saved with the model"


FOLLOW = """
import numpy as np
import gymnasium as gym

result |= {"rewards": [], "ends": [], "observations": []}
step = gym.vector.SyncVectorEnv.step
reset = gym.vector.SyncVectorEnv.reset


def follow_step(self, actions):
    out = step(self, actions)
    result["rewards"].append(np.array(out[1]))
    result["ends"].append(out[2] | out[3])
    result["observations"].append(np.array(out[0]))
    return out


def follow_reset(self, **options):
    out = reset(self, **options)
    result["observations"].append(np.array(out[0]))
    return out


gym.vector.SyncVectorEnv.step, gym.vector.SyncVectorEnv.reset = follow_step, follow_reset
"""


@each(lambda name: defines(name, "class RunningMeanStd", "scaled_rewards", "obs_rms"))  # Procgen: its own
def test_normalisers_over_a_whole_run(name, tmp_path):
    """The statistics at the end are those of the whole stream, and the last rollout's rewards are scaled by them."""
    require_for(name)
    after = "result |= {'obs_mean': agent.obs_rms.mean.numpy(), 'obs_std': agent.obs_rms.std.numpy()}\n"
    after += "result |= {'return_std': agent.return_rms.std.item(), 'scaled': scaled_rewards, 'gamma': args.gamma}"
    got = inspect_run(script(name), *smoke(name), cwd=tmp_path, before=FOLLOW, after=after)
    observations = np.concatenate(got["observations"][:-1]).astype(float)  # nothing is acted on the last one
    np.testing.assert_allclose(got["obs_mean"], observations.mean(0), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(got["obs_std"], observations.std(0), rtol=1e-2, atol=1e-4)

    running, returns = 0.0, []
    for reward, end in zip(got["rewards"], got["ends"], strict=True):
        running = got["gamma"] * running + reward
        returns.append(running)
        running = running * ~end
    assert np.sum(got["ends"]) >= 2, "no episode ended: the case does not tell"
    assert got["return_std"] == pytest.approx(np.std(returns), rel=1e-2)
    scaled = np.array(got["rewards"][-len(got["scaled"]) :]) / np.std(returns)
    np.testing.assert_allclose(got["scaled"], scaled.clip(-10, 10), rtol=1e-2)


# DQN

is_vector_dqn = each(lambda name: family(name) in ("dqn", "c51") and "probes" in LINEAGE[name])


@each(lambda name: defines(name, "def td_target("))
def test_td_target(name):
    module = load(name)
    if uses(name, "torch"):
        array = torch.tensor
    else:
        import jax.numpy as jnp

        array = jnp.array
    rng = np.random.default_rng(0)
    reward, terminated, next_q = rng.normal(size=50), rng.random(50) < 0.5, rng.normal(size=(50, 3))
    as_floats = (array(x.astype(np.float32)) for x in (reward, terminated, next_q))
    expected = [r if end else r + 0.9 * max(q) for r, end, q in zip(reward, terminated, next_q, strict=True)]
    np.testing.assert_allclose(np.asarray(module.td_target(*as_floats, 0.9)), expected, rtol=1e-5)


@each(lambda name: defines(name, "def linear_schedule("))
def test_exploration_schedule(name):
    schedule = load(name).linear_schedule
    assert schedule(1.0, 0.05, 1000, 0) == 1.0
    assert schedule(1.0, 0.05, 1000, 500) == pytest.approx(0.525)
    assert schedule(1.0, 0.05, 1000, 1000) == pytest.approx(0.05)
    assert schedule(1.0, 0.05, 1000, 5000) == pytest.approx(0.05)


@each(lambda name: defines(name, "class ReplayBuffer"))
@pytest.mark.parametrize("steps, num_envs, size", [(1, 1, 30), (2, 3, 30), (5, 2, 4)])
def test_replay_buffer_against_a_list(name, steps, num_envs, size):
    """It holds the last rows, of which each is obs, next_obs, action, reward, terminated."""
    rng, kept = np.random.default_rng(0), []
    torch.manual_seed(0)
    module = load(name)
    replay = module.ReplayBuffer(size, 2, 1, *["cpu"] * uses(name, "torch"))
    for flushed in range(45):
        for _ in range(steps):
            rows = rng.normal(size=(num_envs, 7)).astype(np.float32)
            rows[:, -1] = rng.integers(2, size=num_envs)
            replay.add(rows[:, :2], rows[:, 2:4], rows[:, 4:5], rows[:, 5], rows[:, 6])
            kept = [*kept, *(row.tobytes() for row in rows)][-size:]
        replay.flush()
        if flushed % 7 == 0 or flushed == 44:
            if uses(name, "torch"):
                columns = replay.sample(2000)
            else:
                columns = replay.sample(module.jax.random.key(flushed), replay.stored(), 2000)
            columns = [np.asarray(column).reshape(2000, -1) for column in columns]
            drawn = {row.tobytes() for row in np.concatenate(columns, axis=1).astype(np.float32)}
            assert drawn == set(kept), f"after {flushed + 1} flushes"


TRANSITIONS = """
replay.flush()
rows = np.asarray(replay.rows)[: replay.added]
result["rows"] = np.array(rows)
"""


GREEDY = """
obs_dim = (rows.shape[1] - 3) // 2
observations = np.array(rows[:, :obs_dim])
if "learner" in globals():
    q = np.asarray(q_network.apply(learner["params"], observations))
else:
    q = q_network(torch.from_numpy(observations)).detach().numpy()
if "support" in globals():  # logits of atoms
    q = np.exp(q) @ np.asarray(support) / np.exp(q).sum(2)
result["greedy"] = float((q.argmax(1) == rows[:, 2 * obs_dim]).mean())
"""


FOLLOW_ONCE = f"""
if "follow_step" in globals():  # by the run before
    result["seen"] = []
else:
    exec({FOLLOW_TRANSITIONS!r})
"""


@is_vector_dqn
def test_transitions_and_actions_of_runs(name, tmp_path):
    """The replay keeps the last transitions, whether they truncate or terminate; actions follow the rate.

    In TruncationState the final observation keeps the sign of the episode, and nothing ever terminates;
    in Discounting every second step terminates with observation 1. With both rates at zero every action is the
    greedy one, at one about half are.
    """
    require_for(name)
    argv = ["--num-envs", 2, "--learning-starts", 100]
    probes = ["probe_envs:TruncationStateDiscrete-v0", "probe_envs:DiscountingDiscrete-v0"]
    argvs = [[*argv, "--total-timesteps", 400, "--env-id", probe] for probe in probes]
    argv += ["--env-id", "CartPole-v1", "--buffer-size", 1000]
    argvs += [[*argv, "--total-timesteps", 1200]]
    argv += ["--total-timesteps", 1000, "--learning-starts", 5000]
    argvs += [[*argv, "--start-e", rate, "--end-e", rate] for rate in (0, 1)]
    after = "result['epsilon'] = epsilon\n" + TRANSITIONS + GREEDY
    runs = inspect_runs(script(name), argvs, cwd=tmp_path, before=FOLLOW_ONCE, after=after)
    truncates, terminates, wraps, never, always = runs
    for got in runs:
        seen = got["seen"][-len(got["rows"]) :]
        assert sorted(row.tobytes() for row in got["rows"]) == sorted(row.tobytes() for row in seen)
    assert len(wraps["rows"]) == 1000 and len(wraps["seen"]) == 1200

    got = truncates["rows"]
    assert len(got) == 400 and set(got[:, 0]) == {-1, 1}
    np.testing.assert_array_equal(got[:, 0], got[:, 1])  # obs and next_obs
    np.testing.assert_array_equal(got[:, 0], got[:, 3])  # the reward
    assert not got[:, 4].any()

    got = terminates["rows"]
    assert len(got) == 400
    np.testing.assert_array_equal(got[:, 1], 1)
    np.testing.assert_array_equal(got[:, 4], got[:, 0])  # the step from observation 1 terminates
    np.testing.assert_array_equal(got[:, 3], got[:, 4])

    assert (never["epsilon"], always["epsilon"]) == (0, 1)
    assert never["greedy"] == 1.0
    assert always["greedy"] == pytest.approx(0.5, abs=0.07)


TARGET = """
if "learner" in globals():
    pair = [jax.flatten_util.ravel_pytree(learner[key])[0] for key in ("params", "target_params")]
else:
    pair = [weights.detach(), target_weights]
result["same"] = bool((pair[0] == pair[1]).all())
result["chained"] = getattr(pair[1], "requires_grad", False)
"""


# dqn_onchip_jax.py makes both at the end of a round, as its docstring says
@each(lambda name: family(name) in ("dqn", "c51", "rainbow") and name != "dqn_onchip_jax")
def test_target_copies_are_not_tied_to_gradient_steps(name, tmp_path):
    """Gradient steps at multiples of 10, copies at multiples of 7: of 60 and 63 the first leaves the two apart."""
    require_for(name)
    clock = {"learning_starts": 40, "train_frequency": 10, "target_network_frequency": 7}
    later = int(learns_first(name))  # what is due at a step comes before the next one
    argvs = [smoke(name, total_timesteps=total + later, **clock) for total in (60, 63)]
    apart, copied = inspect_runs(script(name), argvs, cwd=tmp_path, after=TARGET)
    assert not apart["same"] and copied["same"]
    assert not apart["chained"] and not copied["chained"], "the target network remembers how it was computed"


# C51

projects = each(lambda name: defines(name, "def project("))
is_c51 = each(lambda name: family(name) == "c51" and name != "c51_atari_jax")  # its update: test_frame_replay.py


def call_project(name, pmfs, rewards, terminated, support, gamma):
    require_for(name)
    if uses(name, "torch"):
        array = torch.tensor
    else:
        import jax.numpy as jnp

        array = jnp.array
    arrays = (array(np.asarray(x, dtype=np.float32)) for x in (pmfs, rewards, terminated, support))
    return np.asarray(load(name).project(*arrays, gamma), dtype=np.float64)


PROJECTIONS = {  # rewards, gamma, support: what it is about
    "inside": ([0.3, -1.7, 2.2, 0.05], 0.9, (-10, 10, 21)),
    "on the atoms": ([0, 1, -3, 20], 1.0, (-10, 10, 21)),  # each value is an atom, or beyond the last
    "clipped at both ends": ([50, -50, 9.7, -9.7], 0.99, (-10, 10, 51)),
    "ends exactly": ([10, -10, 9.5, -9.5], 0.5, (-10, 10, 41)),
    "two atoms": ([0.25, -1, 1, 0], 0.5, (-1, 1, 2)),
    "off-centre": ([0.5, 100.0, -7.0, 3.3], 0.97, (-3, 100, 101)),
}


@projects
@pytest.mark.parametrize("case", PROJECTIONS)
def test_projection(name, case):
    rewards, gamma, (v_min, v_max, n_atoms) = PROJECTIONS[case]
    support = np.linspace(v_min, v_max, n_atoms, dtype=np.float32)
    rng = np.random.default_rng(0)
    rewards, terminated = np.repeat(rewards, 2), np.tile([0, 1], len(rewards))
    pmfs = rng.dirichlet(np.full(n_atoms, 0.3), size=len(rewards)).astype(np.float32)
    got = call_project(name, pmfs, rewards, terminated, support, gamma)
    expected = [slow_projection(*sample, support, gamma) for sample in zip(pmfs, rewards, terminated, strict=True)]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_allclose(got.sum(1), pmfs.sum(1), atol=1e-5)  # no mass is lost or made
    assert (got >= -1e-6).all()


@projects
def test_projection_keeps_the_mean_inside_the_support(name):
    rng = np.random.default_rng(0)
    support, rewards, terminated = np.linspace(-20, 20, 51), rng.normal(size=200), rng.random(200) < 0.3
    pmfs = rng.dirichlet(np.ones(51), size=200) * (abs(support) < 15)  # r + gamma z stays inside
    pmfs /= pmfs.sum(1, keepdims=True)
    got = call_project(name, pmfs, rewards, terminated, support, 0.9)
    np.testing.assert_allclose(got @ support, rewards + 0.9 * ~terminated * (pmfs @ support), atol=1e-4)


def test_the_projection_oracle_by_hand():
    """Atoms -1, 0, 1: at gamma 1/2 and reward 1/4 they move to -1/4, 1/4 and 3/4; a termination leaves 1/4."""
    assert slow_projection([0.5, 0.25, 0.25], 0.25, 0, [-1, 0, 1], 0.5) == [0.125, 0.625, 0.25]
    assert slow_projection([0.5, 0.25, 0.25], 0.25, 1, [-1, 0, 1], 0.5) == [0, 0.75, 0.25]


@pytest.mark.parametrize("variant", ["c51_looped", "c51_looped_sums"])
def test_the_speed_harness_loops_to_the_same_projection(variant):
    """The text that c51.py is measured against, up to its main block."""
    from benchmark.speed import looped

    module, scope = load("c51"), {"__name__": "c51", "__file__": "c51.py"}
    exec(getattr(looped, variant)(script("c51").read_text()), scope)
    torch.manual_seed(0)
    support, pmfs, rewards = torch.linspace(-10, 10, 21), torch.rand(9, 21).softmax(1), 5 * torch.randn(9)
    arguments = pmfs, rewards.round(), torch.arange(9) % 2, support, 0.9
    torch.testing.assert_close(scope["project"](*arguments), module.project(*arguments))
    assert scope["project"].__code__.co_code != module.project.__code__.co_code


UPDATE_C51_ONCE_MORE = """
as_arrays = lambda arrays: [np.array(array.detach() if hasattr(array, "detach") else array) for array in arrays]
if "learner" in globals():
    sample_key = jax.random.split(jax.random.wrap_key_data(learner["key"]))[1]
    batch = list(replay.sample(sample_key, replay.stored(), args.batch_size))
    batch[2] = batch[2].astype(int).squeeze(1)
    learner["target_params"] = jax.tree.map(jnp.negative, learner["target_params"])  # of another opinion
    learner["params"] = jax.tree.map(lambda leaf: 4 * leaf, learner["params"])  # so sure that some atoms are clamped
    networks = [partial(q_network.apply, learner[key]) for key in ("params", "target_params")]
    vector = lambda tree: np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])
    logits = as_arrays([networks[0](batch[0]), networks[1](batch[1]), networks[0](batch[1])])
    before, sums = vector(learner["params"]), np.array(learner["losses"])
    learner = update(learner, replay.stored())
    sums, step = np.asarray(learner["losses"]) - sums, vector(learner["params"]) - before
    adam = learner["opt_state"][0]
    moments = vector(adam.mu), vector(adam.nu), int(adam.count)
else:
    state = torch.get_rng_state()
    if hasattr(replay, "window"):  # frames stored once
        columns, frames = replay.sample(args.batch_size)
        batch = [frames[:, :-1], frames[:, 1:], *columns[:, -3:].unbind(1)]
    else:
        batch = list(replay.sample(args.batch_size))
        batch[2] = batch[2].squeeze(1)
    torch.set_rng_state(state)
    batch[2] = batch[2].long()
    target_weights.copy_(-target_weights.roll(5))  # of another opinion
    weights.data.mul_(4)  # so sure that some atoms are clamped
    networks = [q_network, target_network]
    logits = as_arrays([networks[0](batch[0]), networks[1](batch[1]), networks[0](batch[1])])
    before = weights.detach().clone().numpy()
    sums = np.array([value.item() for value in update().values()])
    step = weights.detach().numpy() - before
    adam = optimizer.state_dict()["state"][0]
    moments = adam["exp_avg"].numpy(), adam["exp_avg_sq"].numpy(), int(adam["step"])
result |= {"batch": as_arrays(batch), "logits": logits, "sums": sums, "step": step, "moments": moments}
result |= {"args": vars(args)}
"""


@is_c51
def test_c51_update(name, tmp_path):
    """One more update of a run against loops over samples, actions and atoms, and its step against Adam's rule."""
    require_for(name)
    argv = smoke(name, n_atoms=11, v_min=-2, v_max=8, gamma=0.9, batch_size=32, target_network_frequency=70)
    argv = [*argv, "--total-timesteps", 600, "--buffer-size", 400, "--seed", 2]  # enough for games that end
    got = inspect_run(script(name), *argv, cwd=tmp_path, after=UPDATE_C51_ONCE_MORE)
    support = np.linspace(-2, 8, 11)
    obs, next_obs, actions, rewards, terminated = got["batch"]
    logits, next_logits, online_logits = (array.astype(float) for array in got["logits"])
    best, online = ((np.exp(x) @ support / np.exp(x).sum(2)).argmax(1) for x in (next_logits, online_logits))
    assert (best != online).any(), "the case does not tell which network chooses the next action"
    losses, q_values, smallest = [], [], 1
    for i in range(32):
        distributions = [np.exp(row) / np.exp(row).sum() for row in next_logits[i]]
        best = max(distributions, key=lambda pmf: sum(pmf * support))
        target = slow_projection(best, rewards[i], terminated[i], support, 0.9)
        predicted = np.exp(logits[i, actions[i]]) / np.exp(logits[i, actions[i]]).sum()
        smallest = min(smallest, *predicted)
        losses.append(-sum(t * math.log(min(max(p, 1e-5), 1 - 1e-5)) for t, p in zip(target, predicted, strict=True)))
        q_values.append(sum(predicted * support))
    assert smallest < 1e-6, "the case does not tell whether probabilities are clamped"
    assert terminated.any() and not terminated.all() and len(set(actions.tolist())) > 1
    np.testing.assert_allclose(got["sums"], [np.mean(losses), np.mean(q_values)], rtol=1e-3)
    first, second, count = got["moments"]
    step = -got["args"]["learning_rate"] * first / (1 - 0.9**count)
    step /= np.sqrt(second / (1 - 0.999**count)) + 0.01 / 32
    np.testing.assert_allclose(got["step"], step, rtol=0.02, atol=1e-7)
