"""The weights in the checkpoint of a run that has not ended, as its file saves them at the end.

A torch file's checkpoint has the state of its `agent` or of its `q_network`; that of a JAX file has its `learner`, with
`params` or with those of an actor and of critics. Only these are read: a replay buffer beside them stays on the disk.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def checkpoint_of(run_dir):
    """The checkpoint in a run folder, or None."""
    return next(iter(sorted(Path(run_dir).glob("checkpoint.*"))), None)


def read_torch(path):
    """The weights in a torch file's checkpoint, and its step."""
    import torch

    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    model = next(saved[name] for name in ("agent", "q_network") if name in saved)
    return {name: x.numpy().copy() for name, x in model.items()}, saved["global_step"]


def parts_of(path, names):
    """Some values of the map in a msgpack file, without what lies between them."""
    import msgpack
    from flax.serialization import msgpack_restore

    found = {}
    with path.open("rb") as stream, path.open("rb") as file:
        unpacker = msgpack.Unpacker(stream, max_buffer_size=0)
        for _ in range(unpacker.read_map_header()):
            name, start = unpacker.unpack(), unpacker.tell()
            unpacker.skip()
            if name in names:
                file.seek(start)
                found[name] = msgpack_restore(file.read(unpacker.tell() - start))
            if len(found) == len(names):
                break
    return found


def read_msgpack(path):
    """The weights in a JAX file's checkpoint, and its step."""
    from flax.traverse_util import flatten_dict

    saved = parts_of(path, ["learner", "global_step"])
    learner = saved["learner"]
    if "params" not in learner:
        learner = {"params": {"actor": learner["actor_params"], "qf": learner["qf_params"]}}
    return flatten_dict(learner["params"], sep="."), int(saved["global_step"])


def write_model(run_dir, folder):
    """Write the weights of a run's checkpoint as a model, with the run's flags; returns the step of the checkpoint.

    A run that goes on replaces its checkpoint, never writes into it: what is read here is one moment.
    """
    from safetensors.numpy import save_file

    path = checkpoint_of(run_dir)
    try:
        weights, step = read_torch(path) if path.suffix == ".pt" else read_msgpack(path)
    except StopIteration:
        raise ValueError(f"{path} holds no weights under the name of agent or of q_network") from None
    except ImportError as error:
        raise ValueError(f"{path} needs a package that is not installed: {error}") from error
    except Exception as error:  # a file of another program, or half of one
        raise ValueError(f"{path} is not a checkpoint with a model: {type(error).__name__} {error}") from error
    save_file(weights, Path(folder, "model.safetensors"))
    shutil.copyfile(Path(run_dir, "args.json"), Path(folder, "args.json"))
    return step


def goes_on(run_dir):
    """Whether the newest weights of a run are in its checkpoint: it has not ended, or was resumed since."""
    model, checkpoint = Path(run_dir, "model.safetensors"), checkpoint_of(run_dir)
    return checkpoint is not None and (not model.is_file() or checkpoint.stat().st_mtime_ns > model.stat().st_mtime_ns)


@contextmanager
def with_model(run_dir):
    """A folder with the newest weights of a run as model.safetensors, and the step if they are of a checkpoint."""
    if not goes_on(run_dir):
        yield Path(run_dir), None
        return
    with TemporaryDirectory() as folder:
        step = write_model(run_dir, folder)
        yield Path(folder), step
