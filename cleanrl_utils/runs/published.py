"""Models in the format that the original publishes, as run folders that our files play.

The original leaves <exp_name>.cleanrl_model in the folder of a run and in a repository of the hub: a torch state dict,
several of them, or Flax's msgpack, with the flags inside or not at all. It is read as data: torch with weights_only,
msgpack holds nothing else. `make_run` gives the arrays the names that they have in our file of the same name, and
takes the flags from inside, from beside it (args.json, the table in the events, the model card), else our defaults.
What cannot be mapped raises NotMapped, with the reason in one line.
"""

import ast
import functools
import itertools
import json
import pickle
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np

from cleanrl_utils.runs.events import records
from cleanrl_utils.runs.folder import script_flags

SCRIPTS = Path(__file__).resolve().parents[2] / "cleanrl"
BESIDE = "args.json", "README.md"  # where flags may stand, besides the events
NAMES = re.compile(  # of run folders and of repositories
    r"(?P<env>.+?)(__(?P<exp>\w+?)__(?P<seed>\d+)__\d+|-(?P<exp_name>\w+)-seed(?P<number>\d+))", re.ASCII
)


def same(*layers):
    return {layer: layer for layer in layers}


# the layers of a published model -> those of ours; what stands for several networks has their number in front
MLP = {f"network.{i}": str(i) for i in (0, 2, 4)}
NATURE = same(*(f"network.{i}" for i in (0, 2, 4, 7, 9)))
PPO = same(*(f"{network}.{i}" for network in ("actor", "critic") for i in (0, 2, 4)))
PPO_ATARI = same(*(f"network.{i}" for i in (0, 2, 4, 7)), "actor", "critic")
ACTOR = {f"0.{name}": f"actor.layers.{i}" for name, i in (("fc1", 0), ("fc2", 2), ("fc_mu", 4))}
MLP_JAX = same(*(f"params.Dense_{i}" for i in range(3)))
NATURE_JAX = same(*(f"params.Conv_{i}" for i in range(3)), "params.Dense_0", "params.Dense_1")
ACTOR_JAX = {f"0.params.Dense_{i}": f"actor.params.Dense_{i}" for i in range(3)}
SCAN = {f"0.params.{layer}": f"params.{layer}" for layer in ("Conv_0", "Conv_1", "Conv_2", "Dense_0")}
SCAN |= {"1.params.Dense_0": "params.Dense_1", "2.params.Dense_0": "params.Dense_2"}
LAYERS = {
    "dqn": MLP,
    "dqn_atari": NATURE,
    "c51": MLP,
    "c51_atari": NATURE,
    "ppo": PPO,
    "ppo_atari": PPO_ATARI,
    "ppo_atari_envpool": PPO_ATARI,
    "ppo_atari_multigpu": PPO_ATARI,
    "ddpg_continuous_action": ACTOR,
    "td3_continuous_action": ACTOR,
    "dqn_jax": MLP_JAX,
    "dqn_atari_jax": NATURE_JAX,
    "c51_jax": MLP_JAX,
    "c51_atari_jax": NATURE_JAX,
    "ddpg_continuous_action_jax": ACTOR_JAX,
    "td3_continuous_action_jax": ACTOR_JAX,
    "ppo_atari_envpool_xla_jax_scan": SCAN,
}
BESIDES = re.compile(r"atoms|0\.action_(scale|bias)|[12]\.(fc\d|params\.Dense_\d)\.\w+")  # atoms, bounds, critics
WITHOUT_STATISTICS = "ppo_continuous_action", "rpo_continuous_action"


class NotMapped(ValueError):
    """Why a published model cannot be played, in one line."""


def find_model(names, exp_name=None):
    """The published model among the names of files; None if there is none, or a model of ours."""
    models = sorted(name for name in names if re.fullmatch(r"[\w.-]+\.cleanrl_model|q_network\.pth", name))
    wanted = f"{exp_name}.cleanrl_model"
    if not models or "model.safetensors" in names:
        return None
    return wanted if wanted in models else models[0]


def read(path):
    """What a model file holds, as plain values, dictionaries, lists and arrays."""
    pickled = path.read_bytes()[:2]
    try:
        if pickled == b"PK" or pickled[:1] == b"\x80":
            import torch

            with warnings.catch_warnings(action="ignore"):  # of pickles that are refused
                return torch.load(path, map_location="cpu", weights_only=True)
        from flax.serialization import msgpack_restore

        return msgpack_restore(path.read_bytes())
    except ImportError as error:
        raise NotMapped(f'{path.name} needs a package: pip install -e ".[jax]" ({error})') from error
    except pickle.UnpicklingError as error:
        reason = "is a pickle of more than arrays, which to load is to run the code in it, or is cut off"
        raise NotMapped(f"{path.name} {reason}") from error
    except Exception as error:  # of readers that expect whole files
        raise NotMapped(f"{path.name} is neither a torch state dict nor Flax's msgpack, or is cut off") from error


def split(content):
    """The flags in a model file, or None, and its arrays by name: {"network.0.weight": ...}."""
    if isinstance(content, dict) and content.keys() == {"model_weights", "args"}:
        return content["args"], flatten(content["model_weights"])
    if isinstance(content, dict) and content and content.keys() == {str(i) for i in range(len(content))}:
        content = [content[str(i)] for i in range(len(content))]  # how Flax writes a list
    if isinstance(content, (list, tuple)) and len(content) == 2:
        flags, rest = content
        if isinstance(flags, dict) and "env_id" in flags:
            return flags, flatten(rest)
    return None, flatten(content)


def flatten(node, prefix=""):
    if isinstance(node, (list, tuple)):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        parts = [flatten(child, f"{prefix}{name}.") for name, child in node.items()]
        return {name: array for part in parts for name, array in part.items()}
    array = np.asarray(node)
    if array.dtype.kind != "f":
        raise NotMapped(f"it holds {prefix.rstrip('.') or 'a value'}, which is no array of numbers")
    return {prefix.rstrip("."): np.ascontiguousarray(array, np.float32)}


def rename(script, arrays):
    """The arrays of a published model by the names of our file."""
    kinds = ("kernel", "bias") if "_jax" in script else ("weight", "bias")
    names = {f"{old}.{kind}": f"{new}.{kind}" for old, new in LAYERS[script].items() for kind in kinds}
    missing = sorted(names.keys() - arrays.keys())
    others = sorted(name for name in arrays.keys() - names.keys() if not BESIDES.fullmatch(name))
    if missing or others:
        what = f"has no {missing[0]}" if missing else f"has {others[0]} besides"
        raise NotMapped(f"the model {what}: it is not laid out as {script}.py of the original does")
    model = {new: arrays[old] for old, new in names.items()}
    if LAYERS[script] is ACTOR:
        try:
            scale, center = arrays["0.action_scale"].reshape(-1), arrays["0.action_bias"].reshape(-1)
        except KeyError as error:
            raise NotMapped(f"the model has no {error}, from which the bounds of actions follow") from error
        model |= {"actor.low": center - scale, "actor.high": center + scale, "actor.scale": scale}
    return model


def table_of_events(folder):
    """The flags that a run of the original writes as a text into its events: a table in Markdown."""
    for file in sorted(folder.glob("events*")):
        for _, event in itertools.islice(records(file), 100):
            for value in event.summary.value:
                if value.tag == "hyperparameters/text_summary" and value.tensor.string_val:
                    lines = value.tensor.string_val[0].decode(errors="replace").splitlines()[2:]
                    return dict(line.strip("|").split("|", 1) for line in lines if line.count("|") >= 3)
    return {}


def plain(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def flags_beside(folder):
    """The flags of a published run: of args.json, of its events, or of its model card."""
    args, card = (Path(folder, name) for name in BESIDE)
    try:
        if args.is_file():
            found = json.loads(args.read_text())
        elif table := table_of_events(folder):
            found = {name: plain(value) for name, value in table.items()}
        else:
            literal = re.search(r"```python\n(\{.*?\})\s*```", card.read_text() if card.is_file() else "", re.DOTALL)
            found = plain(literal[1]) if literal else {}
    except ValueError as error:
        raise NotMapped(f"args.json does not hold flags: {error}") from error
    return found if isinstance(found, dict) else {}


def defaults(script):
    """The flags of one of our files, as far as their defaults are plain values."""
    (args,) = (node for node in ast.parse(script.read_text()).body if getattr(node, "name", None) == "Args")
    fields = {field.target.id: ast.unparse(field.value) for field in args.body if isinstance(field, ast.AnnAssign)}
    return {name: plain(text) for name, text in fields.items() if plain(text) is not text}


def choose_flags(script, known, arrays, env_id, exp_name, seed):
    """The flags for our file: those of the published run over our defaults."""
    ours = script_flags(script)
    flags = defaults(script) | {name: value for name, value in known.items() if name in ours}
    flags |= {"env_id": known.get("env_id", env_id), "exp_name": exp_name, "seed": known.get("seed", seed)}
    if "atoms" in arrays:
        atoms = arrays["atoms"].ravel()
        flags |= {"n_atoms": len(atoms), "v_min": float(atoms[0]), "v_max": float(atoms[-1])}
    if not isinstance(flags["env_id"], str) or not isinstance(flags["seed"], int):
        raise NotMapped('its environment is not known: put args.json beside it, as {"env_id": "CartPole-v1"}')
    if ":" in flags["env_id"]:
        raise NotMapped(f"its environment {flags['env_id']!r} would import a module")
    try:
        json.dumps(flags)
    except (TypeError, ValueError) as error:
        raise NotMapped(f"its flags are not plain values: {error}") from error
    return flags


def choose_script(model, name, exp_name):
    """The name of our file that plays a model."""
    stem = model.removesuffix(".cleanrl_model")
    named = NAMES.fullmatch(name)
    script = stem if stem != model else exp_name or (named and (named["exp"] or named["exp_name"])) or "dqn"
    if script in WITHOUT_STATISTICS:
        raise NotMapped(f"{model} lacks the means and deviations of observations, without which its policy is another")
    if script not in LAYERS:
        known = ", ".join(LAYERS)
        raise NotMapped(f"{model} is of a file whose published models are not mapped; those of these are: {known}")
    return script


def make_run(source, folder, model, name, env_id=None, exp_name=None):
    """Make a run folder of a published model in a folder; `name` tells of what it is, such as CartPole-v1-dqn-seed1.

    Returns the name of our file that plays it.
    """
    from safetensors.numpy import save

    source, folder = Path(source), Path(folder)
    script = choose_script(model, name, exp_name)
    flags, arrays = split(read(source / model))
    flags = flags if isinstance(flags, dict) else flags_beside(source)
    if env_id and flags.get("env_id", env_id) != env_id:
        raise NotMapped(f"it is a run of {flags['env_id']!r}, not of {env_id}")
    named = NAMES.fullmatch(name)
    seed = int(named["seed"] or named["number"]) if named else 1
    ours = SCRIPTS / f"{script}.py"
    flags = choose_flags(ours, flags, arrays, env_id or (named and named["env"]), script, seed)
    tensors = rename(script, arrays)
    folder.mkdir(parents=True, exist_ok=True)
    Path(folder, "model.safetensors").write_bytes(save(tensors))  # save_file makes it for the owner alone
    Path(folder, "args.json").write_text(json.dumps(flags, indent=2) + "\n")
    shutil.copyfile(ours, folder / ours.name)
    return script


@functools.cache
def converted(folder, model):
    """A run folder, until this process ends, of one of the published format."""
    temporary = tempfile.TemporaryDirectory(prefix="published-")
    make_run(folder, temporary.name, model, folder.name)
    return temporary


def as_run(folder, error):
    """What may be a folder of the published format as a run folder, or raise `error`; anything else as it is."""
    model = Path(folder).is_dir() and find_model([path.name for path in Path(folder).iterdir()])
    if not model:
        return folder
    try:
        return Path(converted(Path(folder).resolve(), model).name)
    except NotMapped as reason:
        raise error(f"{folder}: {reason}") from reason


def of_published(error):
    """Let a function of a run folder take one of the published format, too; films go into the latter."""

    def decorate(play):
        @functools.wraps(play)
        def call(run_dir, *args, **options):
            run = as_run(run_dir, error)
            if run is not run_dir:
                options["video_folder"] = options.get("video_folder") or Path(run_dir, "videos")
            return play(run, *args, **options)

        return call

    return decorate
