"""Run folders without a run, for the tools that read them: flags, event files and all that a run writes down."""

import json
import struct

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary


def scalar(wall, tag, value, step, **more):
    return Event(wall_time=wall, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value, **more)]))


def write_events(file, events):
    """An event file without checksums, which readers of ours do not look at."""
    records = (event.SerializeToString() for event in events)
    file.write_bytes(b"".join(struct.pack("<QI", len(data), 0) + data + bytes(4) for data in records))


def write_run(root, env_id, seed, returns, exp_name="ppo", total=1000, commit="a" * 40, ended=True, **flags):
    """A run of `total` steps and 100 seconds with these returns, evenly in time."""
    folder = root / f"{env_id}__{exp_name}__{seed}__{len(list(root.glob('*')))}"
    folder.mkdir(parents=True)
    args = {"exp_name": exp_name, "seed": seed, "env_id": env_id, "total_timesteps": total, "learning_rate": 0.1}
    (folder / "args.json").write_text(json.dumps(args | flags))
    (folder / "commit.txt").write_text(commit + "\n")
    (folder / "packages.txt").write_text(f"gymnasium==1.4.0\ntorch=={flags.pop('torch', '2.13')}\n")
    command = f"python cleanrl/{exp_name}.py --env-id {env_id} --seed {seed} --total-timesteps {total}"
    (folder / "command.txt").write_text(f"{command}\n")
    (folder / f"{exp_name}.py").write_text("")
    steps = np.linspace(0, total, len(returns) + 1)[1:].astype(int).tolist()
    events = [Event(wall_time=5000, file_version="brain.Event:2")]
    events += [scalar(5000 + 100 * s / total, "charts/episodic_return", r, s) for s, r in zip(steps, returns)]
    events.append(scalar(5100, "charts/SPS", 10, total if ended else total // 2))
    write_events(folder / "events.out.tfevents.1", events)
    return folder
