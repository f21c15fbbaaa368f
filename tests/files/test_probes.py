"""Each file that fits a probe environment solves it in seconds; see probe_envs.py for what each isolates."""

import numpy as np
import pytest

from helpers.files import FILES, LINEAGE, defines, family, require_for, script
from helpers.processes import inspect_runs

GAMMA = 0.5  # small, so that values converge fast
FLAGS = {
    "ppo": "--num-envs 4 --num-steps 32 --total-timesteps 10240 --learning-rate 0.005 --num-minibatches 4 "
    "--update-epochs 4 --ent-coef 0 --no-clip-vloss --max-grad-norm 5",
    "pqn": "--num-envs 4 --num-steps 32 --total-timesteps 10240 --learning-rate 0.02 --num-minibatches 4 "
    "--update-epochs 4",
    "dqn": "--total-timesteps 3000 --learning-starts 100 --train-frequency 2 --target-network-frequency 20 "
    "--learning-rate 0.002 --buffer-size 500 --batch-size 64",
}
VALUE_PROBES = "ConstantReward", "ObservationReward", "Discounting", "TruncationOnly", "TruncationState"
# with memory: short sequences are fast
FLAGS["lstm"] = FLAGS["ppo"].replace("--num-envs 4 --num-steps 32", "--num-envs 32 --num-steps 8")
for probe in VALUE_PROBES:
    FLAGS[f"lstm {probe}"] = FLAGS["lstm"].replace("10240", "2560")
for flags in [flags for flags in FLAGS if flags.startswith("lstm")]:
    changed = FLAGS[flags].replace("2560", "5120").replace("learning-rate", "init-lr").replace("ent-", "init-ent-")
    changed += " --norm-adv --trxl-num-layers 2 --trxl-num-heads 2 --trxl-dim 32 --trxl-memory-length 3"
    FLAGS[flags.replace("lstm", "trxl")] = changed
# values are learned sooner than actions
FLAGS["ppo"] = FLAGS["ppo"].replace("10240", "5120")
FLAGS |= {f"ppo {probe}": FLAGS["ppo"].replace("5120", "3840") for probe in VALUE_PROBES}
FLAGS["pqn"] = FLAGS["pqn"].replace("10240", "7680")
# the policy is uncertain by as much as it was disturbed: more steps
FLAGS["rpo"] = FLAGS["ppo"].replace("5120", "10240")
FLAGS |= {f"rpo {probe}": FLAGS[f"ppo {probe}"] for probe in VALUE_PROBES}
# wide networks, and observations that are not standardised: small steps
FLAGS["ppo_continuous_action_isaacgym"] = FLAGS["ppo"].replace("0.005", "0.001").replace("5120", "7680")
# a larger step: at observation 0 Flax's first biases, all zero, leave only the last ones to learn, many atoms of them
FLAGS["c51"] = FLAGS["dqn"].replace("0.002", "0.01") + " --n-atoms 51 --v-min -5 --v-max 5"
FLAGS["ddpg"] = "--total-timesteps 700 --learning-starts 200 --buffer-size 700 --batch-size 32 --tau 0.1 "
FLAGS["sac"] = FLAGS["ddpg"] + "--policy-lr 0.001 --q-lr 0.001 --no-autotune --alpha 0.001"  # next to no entropy
FLAGS["droq"] = FLAGS["sac"] + " --utd 1 --policy-frequency 1"
# more steps: at observation 0 layer normalisation leaves of the action, where all biases are zero, only its sign
FLAGS["droq ActionReward"] = FLAGS["sac"] + " --utd 4 --policy-frequency 2"
# more steps, each with the actor: at observation 0 Flax's biases of zero leave an actor only its last ones to learn
FLAGS["td3"] = FLAGS["ddpg"] = FLAGS["ddpg"].replace("700", "800") + "--learning-rate 0.001 --policy-frequency 1"
# where all observations are one or two numbers, the units of normalised layers move alike and far with each step, and
# running statistics lag behind: small steps. To an actor that sees the same number always, only biases are left.
FLAGS["crossq"] = "--total-timesteps 700 --learning-starts 200 --buffer-size 700 --batch-size 64 --q-hidden 64 --utd 4 "
FLAGS["crossq"] += "--policy-frequency 1 --policy-lr 2e-6 --q-lr 2e-4 --no-autotune --alpha 0.001"
FLAGS["crossq ActionReward"] = FLAGS["crossq"].replace("2e-6", "3e-5")
VALUES = {  # observation -> value
    "ConstantReward": {0: 1},
    "ObservationReward": {-1: -1, 1: 1},
    "Discounting": {0: GAMMA, 1: 1},
    "TruncationOnly": {0: 1 / (1 - GAMMA)},
    "TruncationState": {-1: -1 / (1 - GAMMA), 1: 1 / (1 - GAMMA)},
}
ACTIONS = {"ActionReward": {0: 1}, "ObservationAction": {-1: -1, 1: 1}}  # observation -> side of the right action
REMEMBERED = {"Memory": {-1: -1, 1: 1}}  # first observation -> side of the right last action

LOOK = """
probe = args.env_id.removeprefix("probe_envs:").removesuffix("Discrete-v0").removesuffix("Continuous-v0")
observations = np.array(OBSERVATIONS[probe], dtype=np.float32).reshape(-1, 1)
scale = 1.0
if "qf" in globals():
    if "learner" in globals():
        actor, qf = partial(actor.apply, learner["actor_params"]), partial(qf.apply, learner["qf_params"])
    else:
        observations = torch.from_numpy(observations)
    actions = actor(observations)
    if isinstance(actions, tuple):  # of the Gaussian that tanh squashes, the mean
        actions = np.tanh(actions[0]) if "learner" in globals() else actions[0].tanh()
    values = qf(observations, actions)
    values, actions = (np.asarray(x.detach() if hasattr(x, "detach") else x) for x in (values, actions))
    values = values.mean(2) if values.ndim == 3 else values  # of quantiles, the mean
    values, actions = values.reshape(-1, len(observations)).mean(0), actions.squeeze(1)  # the mean of all critics
elif "agent" in globals() and hasattr(agent, "hidden_gates"):
    x = torch.from_numpy(observations)[None]  # each is the first one of an episode
    if probe == "Discounting":  # one is
        x = x.transpose(0, 1)
    if probe == "Memory":
        x = torch.cat([x, torch.zeros_like(x), torch.zeros_like(x)])
    with torch.no_grad():
        hidden, _ = agent(x, torch.zeros((2, x.shape[1], 128)), torch.zeros(x.shape[:2]))
        hidden = hidden.flatten(0, 1)[-len(observations) :]
        values, actions = agent.critic(hidden).squeeze(1).numpy(), agent.actor_mean(hidden).squeeze(1).numpy()
    scale = agent.return_rms.std.item()
elif "agent" in globals() and hasattr(agent, "attentions"):
    x = torch.from_numpy(observations)[None]  # as above: (steps, episodes, 1)
    if probe == "Discounting":
        x = x.transpose(0, 1)
    if probe == "Memory":
        x = torch.cat([x, torch.zeros_like(x), torch.zeros_like(x)])
    past, hidden = torch.zeros((x.shape[1], args.trxl_memory_length, args.trxl_num_layers, args.trxl_dim)), []
    with torch.no_grad():
        for t, now in enumerate(x):
            output, kept = agent(now, past, torch.full((len(now),), t))
            past = torch.cat([past[:, 1:], kept[:, None]], dim=1)
            hidden.append(output)
        hidden = torch.cat(hidden)[-len(observations) :]
        values, actions = agent.critic(hidden).squeeze(1).numpy(), agent.actor[0](hidden).softmax(1)[:, 1].numpy()
elif "agent" in globals():
    with torch.no_grad():
        values = agent.get_value(torch.from_numpy(observations)).numpy()
        if hasattr(agent, "return_rms"):  # values are of scaled rewards
            scale = agent.return_rms.std.item()
        if hasattr(agent, "actor_mean"):
            normalize = getattr(agent, "normalize", lambda obs: obs)
            actions = agent.actor_mean(normalize(torch.from_numpy(observations))).squeeze(1).numpy()
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
result |= {"values": values * scale, "scale": scale, "actions": actions}
"""


@pytest.mark.parametrize("name", [name for name in FILES if "probes" in LINEAGE[name]])
def test_values_and_actions(name, tmp_path):
    """All probes in one process; the values and actions that were found for them, next to the right ones."""
    require_for(name)
    memory = "lstm" if defines(name, "self.hidden_gates") else "trxl" if defines(name, "self.attentions") else None
    remembered = REMEMBERED if memory else {}
    observations = {probe: list(cases) for probe, cases in (VALUES | ACTIONS | remembered).items()}
    kind, first = LINEAGE[name]["probes"], memory or name.split("_")[0]
    flags = FLAGS.get(first, FLAGS[family(name)])
    argvs = [
        ["--env-id", f"probe_envs:{probe}{kind.capitalize()}-v0", "--gamma", GAMMA]
        + FLAGS.get(name, FLAGS.get(f"{first} {probe}", flags)).split()
        for probe in observations
    ]
    look = LOOK.replace("OBSERVATIONS", repr(observations))
    results = inspect_runs(script(name), argvs, cwd=tmp_path, after=look, variables={"XLA_FLAGS": None})
    wrong = []
    for probe, result in zip(observations, results, strict=True):
        if probe in VALUES:
            found, right = result["values"], np.array(list(VALUES[probe].values()), dtype=float)
            if probe == "ConstantReward" and result["scale"] != 1:
                right = right.clip(max=10 * result["scale"])  # no deviation to divide by: the scaled reward is clipped
            good = found == pytest.approx(right, rel=0.1)
        else:
            found, right = result["actions"], np.array(list((ACTIONS | remembered)[probe].values()))
            # where actions are discrete: the probability of action 1, or the greedy action
            right = 0.5 * right if kind == "continuous" else (right > 0).astype(float)
            good = found == pytest.approx(right, abs=0.15 if kind == "continuous" else 0.1)
        wrong += [] if good else [f"{probe}: {found} in place of {right}"]
    assert not wrong
