"""Models in the format that the original publishes are mapped onto our files, as data.

The networks here have the layout and the names of the published ones; ours must give the same values from their files.
"""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from cleanrl_utils.runs.published import LAYERS, NotMapped, as_run, make_run
from helpers import hub_server
from helpers.files import ROOT, continuous_envs, discrete_envs, load, require, require_for, uses
from helpers.hub_server import Repository
from helpers.processes import environment, run_module

ACTIONS, ATOMS = 2, 7  # CartPole has two
C51_FLAGS = {"n_atoms": ATOMS, "v_min": -3, "v_max": 4.5}
TORCH = [name for name in LAYERS if uses(name, "torch")]
JAX = [name for name in LAYERS if name not in TORCH]
RNG = np.random.default_rng(0)


def flags(name, env_id="CartPole-v1"):
    """As the original's flags of a run: some are ours, some are gone."""
    return {
        "exp_name": name,
        "seed": 4,
        "env_id": env_id,
        "end_e": 0.25,
        "gone": "x",
        "wandb_entity": None,
        **C51_FLAGS,
    }


def observations(name, envs):
    if "atari" in name:
        return RNG.integers(256, size=(5, 4, 84, 84), dtype=np.uint8)
    return RNG.standard_normal((5, *envs.single_observation_space.shape), dtype=np.float32)


def environments(name):
    return continuous_envs() if "continuous" in name else discrete_envs(ACTIONS)


# The published networks in torch


def torch_mlp(sizes, activation):
    from torch import nn

    pairs = [(nn.Linear(a, b), activation()) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])


def torch_nature(*head):
    from torch import nn

    convs = nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3, stride=1)
    layers = [layer for conv in convs for layer in (conv, nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), *head)


def torch_actor():
    import torch
    from torch import nn

    actor = nn.Module()
    actor.fc1, actor.fc2, actor.fc_mu = nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 3)
    actor.register_buffer("action_scale", torch.tensor([[2.0, 1, 0.5]]))  # as older versions shape them
    actor.register_buffer("action_bias", torch.tensor([[0.5, 0, -0.5]]))

    def values(obs):
        hidden = actor.fc2(actor.fc1(obs).relu()).relu()
        return actor.fc_mu(hidden).tanh() * actor.action_scale + actor.action_bias

    return actor, values


def torch_critic():
    from torch import nn

    critic = nn.Module()
    critic.fc1, critic.fc2, critic.fc3 = nn.Linear(7, 256), nn.Linear(256, 256), nn.Linear(256, 1)
    return critic.state_dict()


def publish_torch(name):
    """What the original saves with torch.save for a file, and the values of its network."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if "continuous" in name:
        actor, values = torch_actor()
        return (actor.state_dict(), *[torch_critic()] * (2 if "td3" in name else 1)), values
    network, atari = nn.Module(), "atari" in name
    if "ppo" in name:
        if atari:
            network.network, network.actor, network.critic = torch_nature(), nn.Linear(512, ACTIONS), nn.Linear(512, 1)
        else:
            network.critic = torch_mlp((4, 64, 64, 1), nn.Tanh)
            network.actor = torch_mlp((4, 64, 64, ACTIONS), nn.Tanh)

        def heads(obs):
            hidden = network.network(obs / 255) if atari else obs
            return torch.cat([network.actor(hidden), network.critic(hidden)], dim=1)

        return network.state_dict(), heads
    outputs = ACTIONS * (ATOMS if "c51" in name else 1)
    network.network = torch_nature(nn.Linear(512, outputs)) if atari else torch_mlp((4, 120, 84, outputs), nn.ReLU)
    scale = 255 if atari else 1
    if "dqn" in name:
        return network.state_dict(), lambda obs: network.network(obs / scale)
    network.register_buffer("atoms", torch.linspace(-3, 4.5, ATOMS))

    def values(obs):
        pmfs = network.network(obs / scale).view(len(obs), ACTIONS, ATOMS).softmax(2)
        return (pmfs * network.atoms).sum(2)

    return {"model_weights": network.state_dict(), "args": flags(name)}, values


# The published networks in Flax


def jax_networks():
    import jax.numpy as jnp
    from flax import linen as nn

    class MLP(nn.Module):
        sizes: tuple

        @nn.compact
        def __call__(self, x):
            for size in self.sizes[:-1]:
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(self.sizes[-1])(x)

    class Nature(nn.Module):
        outputs: int

        @nn.compact
        def __call__(self, x):
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
            for features, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
                x = nn.relu(nn.Conv(features, (size, size), (stride, stride), "VALID")(x))
            x = nn.relu(nn.Dense(512)(x.reshape((x.shape[0], -1))))
            return nn.Dense(self.outputs)(x) if self.outputs else x

    return MLP, Nature


def draw(network, *inputs):
    """Parameters of a Flax network, drawn without running it."""
    import jax

    shapes = jax.eval_shape(network.init, jax.random.key(0), *inputs)
    return jax.tree.map(lambda leaf: RNG.normal(0, 0.05, leaf.shape).astype(np.float32), shapes)


def publish_jax(name, obs):
    """What the original gives to flax.serialization.to_bytes for a file, and the values of its network."""
    import jax

    MLP, Nature = jax_networks()
    if "continuous" in name:
        actor, critic = MLP((256, 256, 3)), MLP((256, 256, 1))
        params, others = draw(actor, obs), [draw(critic, np.zeros((1, 7)))] * (2 if "td3" in name else 1)
        return [params, *others], lambda obs: np.tanh(actor.apply(params, obs))  # its bounds are -1 and 1
    if "ppo" in name:
        trunk, actor, critic = Nature(0), MLP((ACTIONS,)), MLP((1,))
        params = [draw(trunk, obs), *(draw(head, np.zeros((1, 512))) for head in (actor, critic))]
        hidden = trunk.apply(params[0], obs)
        heads = [head.apply(part, hidden) for head, part in ((actor, params[1]), (critic, params[2]))]
        return [flags(name), params], lambda _: np.concatenate(heads, axis=1)
    outputs = ACTIONS * (ATOMS if "c51" in name else 1)
    network = Nature(outputs) if "atari" in name else MLP((120, 84, outputs))
    params = draw(network, obs)
    if "dqn" in name:
        return params, lambda obs: network.apply(params, obs)

    def values(obs):
        pmfs = jax.nn.softmax(network.apply(params, obs).reshape(len(obs), ACTIONS, ATOMS))
        return pmfs @ np.linspace(-3, 4.5, ATOMS)

    return {"model_weights": params, "args": flags(name)}, values


def publish(name, folder, obs=None):
    """Write the model of a file as the original does; returns the values of its network as a function."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.cleanrl_model"
    if name in TORCH:
        import torch

        content, values = publish_torch(name)
        torch.save(content, path)
        return lambda obs: values(torch.tensor(obs, dtype=torch.float32)).detach().numpy()
    from flax.serialization import to_bytes

    content, values = publish_jax(name, obs)
    path.write_bytes(to_bytes(content))
    return lambda obs: np.asarray(values(obs))


# Ours


def our_values(name, module, run, envs, obs):
    """What the network of our file gives with the model of a run."""
    args, weights = json.loads((run / "args.json").read_text()), module.load_file(run / "model.safetensors")
    sizes = [args["n_atoms"]] if "c51" in name else []
    support = np.linspace(args["v_min"], args["v_max"], *sizes, dtype=np.float32) if sizes else None
    if name in TORCH:
        return torch_values(name, module, weights, envs, sizes, module.torch.tensor(obs).float(), support)
    params = module.unflatten_dict(weights, sep=".")
    if "continuous" in name:
        return module.Actor(envs.single_action_space.low, envs.single_action_space.high).apply(params["actor"], obs)
    if "ppo" in name:
        logits, value = module.Agent(ACTIONS).apply(params, obs)
        return np.column_stack([logits, value])
    outputs = module.QNetwork(ACTIONS, *sizes).apply(params, obs)
    return module.jax.nn.softmax(outputs) @ support if sizes else outputs


def torch_values(name, module, weights, envs, sizes, obs, support):
    if "continuous" in name:
        actor = module.Actor(envs)
        actor.load_state_dict({key.removeprefix("actor."): array for key, array in weights.items()})
        return actor(obs).detach().numpy()
    network = (module.Agent if "ppo" in name else module.QNetwork)(envs, *sizes)
    network.load_state_dict(weights)
    if "ppo" in name:
        logits = network.actor(network.network(obs / 255) if "atari" in name else obs)
        return np.column_stack([logits.detach(), network.get_value(obs).detach()])
    outputs = network(obs).detach()
    return outputs.softmax(2) @ module.torch.tensor(support) if sizes else outputs.numpy()


SAME = {name: pytest.mark.slow for name in ("ppo_atari_envpool", "ppo_atari_multigpu")}  # as ppo_atari


@pytest.mark.parametrize("name", [pytest.param(name, marks=SAME.get(name, ())) for name in LAYERS])
def test_values(name, tmp_path):
    """Ours are those of the published network, and the policy of our file acts by them."""
    require_for(name)
    module, envs = load(name), environments(name)
    obs = observations(name, envs)
    values = publish(name, tmp_path, obs)(obs)
    run, published = tmp_path / "run", f"{name}.cleanrl_model"
    assert make_run(tmp_path, run, published, f"CartPole-v1-{name}-seed4") == name
    assert {path.name for path in run.iterdir()} == {"args.json", f"{name}.py", "model.safetensors"}
    assert len({path.stat().st_mode for path in run.iterdir()}) == 1, "not readable by the same people"
    args = json.loads((run / "args.json").read_text())
    assert (args["env_id"], args["exp_name"], args["seed"]) == ("CartPole-v1", name, 4) and "gone" not in args
    np.testing.assert_allclose(our_values(name, module, run, envs, obs), values, rtol=1e-3, atol=1e-5)
    assert np.ptp(values, axis=0).min() > 1e-4, "an oracle that says the same of everything"
    device = module.torch.device("cpu") if name in TORCH else module.jax.devices("cpu")[0]
    actions = module.load_policy(run, envs, device, deterministic=True)(obs)
    if "continuous" in name:
        np.testing.assert_allclose(actions, values, rtol=1e-3, atol=1e-5)
    else:
        assert actions.tolist() == values[:, :ACTIONS].argmax(1).tolist()


def test_atoms_are_flags(tmp_path):
    """Of a distributional model without flags: how many there are, and from where to where."""
    require_for("c51")
    import torch

    torch.save(publish_torch("c51")[0]["model_weights"], tmp_path / "c51.cleanrl_model")
    make_run(tmp_path, tmp_path / "run", "c51.cleanrl_model", "CartPole-v1-c51-seed3")
    args = json.loads((tmp_path / "run/args.json").read_text())
    assert {name: args[name] for name in C51_FLAGS} == C51_FLAGS and (args["seed"], args["end_e"]) == (3, 0.05)


def test_teacher(tmp_path):
    """QDagger learns from a published model that was made a run folder."""
    name = "qdagger_dqn_atari_impalacnn"
    require_for(name)
    publish("dqn_atari", tmp_path)
    run, env_id = tmp_path / "run", "BreakoutNoFrameskip-v4"
    make_run(tmp_path, run, "dqn_atari.cleanrl_model", f"{env_id}-dqn_atari-seed1")
    teacher = load(name).load_teacher(run, env_id, discrete_envs(ACTIONS))
    published, _ = publish_torch("dqn_atari")
    assert (teacher.state_dict()["network.9.weight"] == published["network.9.weight"]).all()


# What is known of a run


def evaluate(*argv, cwd, code=0):
    done = run_module("cleanrl_utils.evaluate", *argv, cwd=cwd, code=code)
    return done.stdout if code == 0 else done.stderr


def test_evaluate_a_folder(tmp_path):
    """A run of the original: its flags are in its events alone; nothing is written into its folder but films."""
    require_for("dqn")
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "runs/CartPole-v1__dqn__3__1650000000"
    publish("dqn", folder)
    rows = "\n".join(f"|{name}|{value}|" for name, value in flags("dqn").items())
    with SummaryWriter(folder) as writer:
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    before = sorted(path.name for path in folder.iterdir())
    output = evaluate(folder, "--episodes", 2, "--output", "played.json", cwd=tmp_path)
    assert (
        "Mean return of 2 episodes" in output
        and json.loads((tmp_path / "played.json").read_text())["seed"] == 4 + 2**30
    )
    assert sorted(path.name for path in folder.iterdir()) == before
    run = as_run(folder, ValueError)
    args = json.loads((run / "args.json").read_text())
    assert (args["end_e"], args["wandb_entity"], args["buffer_size"]) == (0.25, None, 10_000)
    other = folder.with_name("other")
    publish("dqn", other)
    with pytest.raises(KeyError, match="other: its environment is not known: put args.json beside it"):
        as_run(other, KeyError)
    (other / "args.json").write_text(json.dumps({"env_id": "CartPole-v1", "end_e": 1.0, "seed": 7}))
    args = json.loads((as_run(other, ValueError) / "args.json").read_text())
    assert (args["end_e"], args["seed"], args["exp_name"]) == (1, 7, "dqn")
    assert as_run(tmp_path, ValueError) is tmp_path and as_run("nowhere", ValueError) == "nowhere"


class Bomb:
    """To unpickle it is to make the file that it names."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_cannot_be_mapped(tmp_path):
    """One line each, and nothing in a model is run."""
    require_for("dqn")
    require("flax")
    import torch

    cases = 0

    def refuse(words, content, model="dqn.cleanrl_model", name="CartPole-v1-dqn-seed1", **options):
        nonlocal cases
        cases += 1
        folder = tmp_path / f"{cases}"
        folder.mkdir()
        if isinstance(content, bytes):
            (folder / model).write_bytes(content)
        else:
            torch.save(content, folder / model)
        with pytest.raises(NotMapped, match=words) as error:
            make_run(folder, folder / "run", model, name, **options)
        assert "\n" not in str(error.value) and not (folder / "run").exists()

    weights, _ = publish_torch("dqn")
    exploded = tmp_path / "exploded"
    refuse("which to load is to run the code in it", {"network.0.weight": Bomb(exploded)})
    refuse("which to load is to run the code in it", pickle.dumps(Bomb(exploded)))
    assert not exploded.exists()
    for broken in b"", b"PK", b"PK" + bytes(100), b"\x82\xa1", b"text":
        refuse("is neither a torch state dict nor Flax's msgpack|is cut off|holds a value", broken)
    refuse("has no network.0.bias: it is not laid out as dqn.py", {"network.0.weight": weights["network.0.weight"]})
    refuse("has other.weight besides", weights | {"other.weight": weights["network.0.weight"]})
    refuse("no array of numbers", weights | {"network.0.weight": "text"})
    refuse("others.cleanrl_model is of a file whose .* those of these are: dqn,", weights, "others.cleanrl_model")
    refuse("lacks the means and deviations", weights, "ppo_continuous_action.cleanrl_model")
    refuse("environment is not known", weights, name="somewhere")
    refuse("would import a module", {"model_weights": weights, "args": {"env_id": "os:A-v0", "seed": 1}})
    refuse("is a run of 'A-v0', not of B-v0", {"model_weights": weights, "args": {"env_id": "A-v0"}}, env_id="B-v0")
    actor = {key: value for key, value in torch_actor()[0].state_dict().items() if key != "action_scale"}
    refuse("has no '0.action_scale'", (actor, {}), "ddpg_continuous_action.cleanrl_model")


# On the hub

NAME = "cleanrl/CartPole-v1-dqn-seed1"


@pytest.fixture
def hub():
    require("huggingface_hub", "yaml")
    with hub_server.serve() as server:
        yield server


def tool(name, *argv, hub, cwd, code=0):
    names = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cwd / "hf"), "PYTHONPATH": str(ROOT), "HF_TOKEN": None}
    done = run_module(f"cleanrl_utils.{name}", *argv, cwd=cwd, env=environment(**names), code=code)
    return done.stdout if code == 0 else done.stderr


def test_from_the_hub(hub, tmp_path):
    """`enjoy` as it is typed for the public hub, and `pull`; the script there is not run, nor brought here."""
    require_for("dqn")
    publish("dqn", tmp_path / "published")
    mark = tmp_path / "executed"
    card = f"# A model\n\n```python\n{flags('dqn') | {'end_e': 0.125}}\n```\n"
    files = {"dqn.py": f"open({str(mark)!r}, 'w')\n".encode(), "README.md": card.encode(), "poetry.lock": b"x"}
    files["dqn.cleanrl_model"] = (tmp_path / "published/dqn.cleanrl_model").read_bytes()
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(files)
    command = ["enjoy", "--exp-name", "dqn", "--env-id", "CartPole-v1", "--hf-entity", "cleanrl", "--episodes", 3]
    output = tool(*command, hub=hub, cwd=tmp_path)
    assert f"{NAME} holds dqn.cleanrl_model, a model in the original's format, which our dqn.py plays\n" in output
    assert "Mean return of 3 episodes" in output and not (tmp_path / "runs").exists()

    output = tool("hub", "pull", NAME, hub=hub, cwd=tmp_path)
    run = tmp_path / "runs/CartPole-v1-dqn-seed1"
    assert sorted(path.name for path in run.iterdir()) == ["args.json", "dqn.py", "model.safetensors"]
    assert (run / "dqn.py").read_bytes() == (ROOT / "cleanrl/dqn.py").read_bytes() and "Beware" not in output
    args = json.loads((run / "args.json").read_text())
    assert (args["end_e"], args["seed"]) == (0.125, 4), "the flags of the model card"
    assert not mark.exists() and not any("poetry.lock" in request or "dqn.py" in request for request in hub.requests)

    hub.repositories[NAME].commit(files | {"dqn.cleanrl_model": pickle.dumps(Bomb(mark))})
    for argv in command, ["hub", "pull", NAME, "--output", "another"]:
        (line,) = tool(*argv, hub=hub, cwd=tmp_path, code=2).splitlines()
        assert f"{NAME}: dqn.cleanrl_model is a pickle of more than arrays" in line
    assert not mark.exists() and not (tmp_path / "another").exists()
