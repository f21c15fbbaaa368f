"""Each file that fits the probe environment of many cases solves it in seconds; see Cases in probe_envs.py."""

import numpy as np
import pytest

from helpers.files import FILES, LINEAGE, defines, family, require_for, script
from helpers.processes import LONG, inspect_runs

GAMMA = 0.5  # small, so that values converge fast
FLAGS = {
    "ppo": "--num-envs 4 --num-steps 32 --total-timesteps 10240 --learning-rate 0.005 --num-minibatches 4 "
    "--update-epochs 4 --ent-coef 0 --no-clip-vloss --max-grad-norm 5",
    "pqn": "--num-envs 4 --num-steps 32 --total-timesteps 10240 --learning-rate 0.01 --num-minibatches 4 "
    "--update-epochs 4",
    "dqn": "--total-timesteps 6000 --learning-starts 100 --train-frequency 2 --target-network-frequency 40 "
    "--learning-rate 0.002 --buffer-size 1000 --batch-size 64",
    "ddpg": "--total-timesteps 1500 --learning-starts 200 --buffer-size 1500 --batch-size 64 --tau 0.1 ",
}
# with memory: short sequences are fast
FLAGS["lstm"] = FLAGS["ppo"].replace("--num-envs 4 --num-steps 32", "--num-envs 32 --num-steps 8")
FLAGS["trxl"] = FLAGS["lstm"].replace("learning-rate", "init-lr").replace("ent-", "init-ent-").replace("10240", "15360")
FLAGS["trxl"] += " --norm-adv --trxl-num-layers 2 --trxl-num-heads 2 --trxl-dim 32 --trxl-memory-length 3"
# the policy is uncertain by as much as it was disturbed: more steps
FLAGS["rpo"] = FLAGS["ppo"].replace("10240", "15360")
# wide networks, and observations that are not standardised: small steps
FLAGS["ppo_continuous_action_isaacgym"] = FLAGS["ppo"].replace("0.005", "0.001")
FLAGS["c51"] = FLAGS["dqn"] + " --n-atoms 51 --v-min -5 --v-max 5"
FLAGS["sac"] = FLAGS["ddpg"] + "--policy-lr 0.001 --q-lr 0.001 --no-autotune --alpha 0.001"  # next to no entropy
FLAGS["droq"] = FLAGS["sac"] + " --utd 1 --policy-frequency 1"
FLAGS["td3"] = FLAGS["ddpg"] = FLAGS["ddpg"] + "--learning-rate 0.001 --policy-frequency 1"
# without a target network: small steps, and large batches, whose statistics vary less
FLAGS["crossq"] = "--total-timesteps 2000 --learning-starts 200 --buffer-size 2000 --batch-size 512 --q-hidden 64 "
FLAGS["crossq"] += "--utd 1 --policy-frequency 1 --policy-lr 0.0005 --q-lr 0.0005 --no-autotune --alpha 0.001"
VALUES = [1, -1, GAMMA, 1, 1 / (1 - GAMMA), -1 / (1 - GAMMA)]  # of the first cases of probe_envs.Cases
SIDES = [1, -1]  # of the right action in the last two; with memory also of the last one of probe_envs.Memory

LOOK = """
observations = np.eye(8, dtype=np.float32) if "Cases" in args.env_id else np.array([[1], [-1]], dtype=np.float32)
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
elif "agent" in globals() and (hasattr(agent, "hidden_gates") or hasattr(agent, "attentions")):
    x = torch.from_numpy(observations)
    x = torch.stack([x[[0, 1, 2, 2, 4, 5, 6, 7]], x]) if len(x) == 8 else torch.stack([x, 0 * x, 0 * x])
    past, hidden = None, []
    with torch.no_grad():
        for t, now in enumerate(x):  # (episodes, numbers)
            if hasattr(agent, "hidden_gates"):
                past = torch.zeros((2, len(now), 128)) if past is None else past
                output, past = agent(now[None], past, torch.zeros((1, len(now))))
                output = output.flatten(0, 1)
            else:
                size = len(now), args.trxl_memory_length, args.trxl_num_layers, args.trxl_dim
                past = torch.zeros(size) if past is None else past
                output, kept = agent(now, past, torch.full((len(now),), t))
                past = torch.cat([past[:, 1:], kept[:, None]], dim=1)
            hidden.append(output)
        if len(hidden) == 2:  # case 3 comes second, the others first
            hidden[0][3] = hidden[1][3]
        hidden = hidden[0] if len(hidden) == 2 else hidden[-1]
        values = agent.critic(hidden).squeeze(1).numpy()
        if hasattr(agent, "actor_mean"):
            actions = agent.actor_mean(hidden).squeeze(1).numpy()
        else:
            actions = agent.actor[0](hidden).softmax(1)[:, 1].numpy()
    if hasattr(agent, "return_rms"):
        scale = agent.return_rms.std.item()
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
result |= {"values": values[:6] * scale, "actions": actions[-2:]}
"""


@pytest.mark.parametrize("name", [name for name in FILES if "probes" in LINEAGE[name]])
def test_values_and_actions(name, tmp_path):
    """The values and actions that a file finds for all cases, next to the right ones."""
    require_for(name)
    memory = "lstm" if defines(name, "self.hidden_gates") else "trxl" if defines(name, "self.attentions") else None
    kind, first = LINEAGE[name]["probes"], memory or name.split("_")[0]
    flags = FLAGS.get(name, FLAGS.get(first, FLAGS[family(name)])).split()
    probes = ["Cases", *(["Memory"] if memory else [])]
    argvs = [["--env-id", f"probe_envs:{probe}{kind.capitalize()}-v0", "--gamma", GAMMA, *flags] for probe in probes]
    # where actions are discrete: the probability of action 1, or the greedy action
    sides = [0.5 * side if kind == "continuous" else float(side > 0) for side in SIDES]
    wrong = []
    results = inspect_runs(script(name), argvs, cwd=tmp_path, after=LOOK, variables=LONG)
    for probe, result in zip(probes, results, strict=True):
        if probe == "Cases" and result["values"] != pytest.approx(np.array(VALUES), rel=0.1, abs=0.1):
            wrong.append(f"values {result['values']} in place of {VALUES}")
        if result["actions"] != pytest.approx(np.array(sides), abs=0.15 if kind == "continuous" else 0.1):
            wrong.append(f"actions of {probe} {result['actions']} in place of {sides}")
    assert not wrong
