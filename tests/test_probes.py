"""Each file that fits a probe environment solves it in seconds; see probe_envs.py for what each isolates."""

import numpy as np
import pytest
from conftest import FILES, LINEAGE, family, inspect_run, require_for, script

GAMMA = 0.5  # small, so that values converge fast
FLAGS = {
    "ppo": "--num-envs 4 --num-steps 32 --total-timesteps 10240 --learning-rate 0.005 --num-minibatches 4 "
    "--update-epochs 4 --ent-coef 0 --no-clip-vloss --max-grad-norm 5",
    "pqn": "--num-envs 4 --num-steps 32 --total-timesteps 10240 --learning-rate 0.02 --num-minibatches 4 "
    "--update-epochs 4",
    "dqn": "--total-timesteps 3000 --learning-starts 100 --train-frequency 2 --target-network-frequency 20 "
    "--learning-rate 0.002 --buffer-size 500 --batch-size 64",
}
# a larger step: at observation 0 Flax's first biases, all zero, leave only the last ones to learn, many atoms of them
FLAGS["c51"] = FLAGS["dqn"].replace("0.002", "0.01") + " --n-atoms 51 --v-min -5 --v-max 5"
VALUES = {  # observation -> value
    "ConstantReward": {0: 1},
    "ObservationReward": {-1: -1, 1: 1},
    "Discounting": {0: GAMMA, 1: 1},
    "TruncationOnly": {0: 1 / (1 - GAMMA)},
    "TruncationState": {-1: -1 / (1 - GAMMA), 1: 1 / (1 - GAMMA)},
}
ACTIONS = {"ActionReward": {0: 1}, "ObservationAction": {-1: -1, 1: 1}}  # observation -> side of the right action

LOOK = """
observations = np.array({observations}, dtype=np.float32).reshape(-1, 1)
scale = 1.0
if "agent" in globals():
    with torch.no_grad():
        values = agent.get_value(torch.from_numpy(observations)).numpy()
        if hasattr(agent, "return_rms"):  # values are of scaled rewards
            scale = agent.return_rms.std.item()
        if hasattr(agent, "actor_mean"):
            actions = agent.actor_mean(agent.normalize(torch.from_numpy(observations))).squeeze(1).numpy()
        else:
            actions = agent.actor(torch.from_numpy(observations)).softmax(1)[:, 1].numpy()
else:
    if "learner" in globals():
        q = np.asarray(q_network.apply(learner["params"], observations))
    else:
        q = q_network(torch.from_numpy(observations)).detach().numpy()
    if "support" in globals():  # logits of atoms
        q = np.exp(q) @ np.asarray(support) / np.exp(q).sum(2)
    values, actions = q.max(1), q.argmax(1)
result |= {{"values": values * scale, "scale": scale, "actions": actions}}
"""


def solve(name, probe, observations, cwd):
    require_for(name)
    kind = LINEAGE[name]["probes"]
    argv = ["--env-id", f"probe_envs:{probe}{kind.capitalize()}-v0", "--gamma", GAMMA, *FLAGS[family(name)].split()]
    return inspect_run(script(name), *argv, cwd=cwd, after=LOOK.format(observations=list(observations)))


with_probes = pytest.mark.parametrize("name", [name for name in FILES if "probes" in LINEAGE[name]])


@with_probes
@pytest.mark.parametrize("probe", VALUES)
def test_value(name, probe, tmp_path):
    result = solve(name, probe, VALUES[probe], tmp_path)
    expected = np.array(list(VALUES[probe].values()), dtype=float)
    if probe == "ConstantReward" and result["scale"] != 1:
        expected = expected.clip(max=10 * result["scale"])  # no deviation to divide by: the scaled reward is clipped
    assert result["values"] == pytest.approx(expected, rel=0.1)


@with_probes
@pytest.mark.parametrize("probe", ACTIONS)
def test_action(name, probe, tmp_path):
    actions = solve(name, probe, ACTIONS[probe], tmp_path)["actions"]
    for action, side in zip(actions, ACTIONS[probe].values(), strict=True):
        if LINEAGE[name]["probes"] == "continuous":
            assert action == pytest.approx(0.5 * side, abs=0.15)
        else:  # the probability of action 1, or the greedy action
            assert abs(action - (side > 0)) < 0.1
