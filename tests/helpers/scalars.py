"""What a run has logged, and whether it is in order."""

import struct


def raw_scalars(folder, partial_tail=False):
    """Every scalar in a run's event files as (tag, step, value), in the order of writing.

    TensorBoard's own reader drops what a restart makes obsolete; this one hides nothing.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    scalars = []

    def begun(data):
        (length,) = struct.unpack_from("<Q", data.ljust(8, b"\0"))
        return Event.FromString(data[12 : 12 + length]).wall_time if len(data) >= 12 + length else 0

    for data in sorted((file.read_bytes() for file in folder.glob("events*")), key=begun):
        position = 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data.ljust(position + 8, b"\0"), position)
            end = position + 12 + length + 4
            if end > len(data):
                assert partial_tail, f"a file in {folder} ends in the middle of a record"
                break
            event = Event.FromString(data[position + 12 : end - 4])
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    continue
                number = value.simple_value if value.HasField("simple_value") else make_ndarray(value.tensor).item()
                scalars.append((value.tag, event.step, number))
            position = end
    return scalars


def tensorboard_scalars(folder):
    """The scalars that TensorBoard shows: tag -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def steps(scalars, prefix=""):
    """tag -> its steps in the order of writing, from raw scalars."""
    by_tag = {}
    for tag, step, _ in scalars:
        if tag.startswith(prefix):
            by_tag.setdefault(tag, []).append(step)
    return by_tag


def untimed(scalars):
    return [scalar for scalar in scalars if "SPS" not in scalar[0] and scalar[0] != "charts/compile_time"]


def assert_clean(scalars):
    for tag, at in steps(scalars).items():
        assert at == sorted(set(at)), f"{tag} has steps that are doubled or out of order: {at}"


def grid(scalars):
    """The metrics with a fixed period; episodes end where they end."""
    at_ends = ("charts/episodic", "charts/episode_", "charts/episodes", "charts/avg_episodic")
    return {tag: at for tag, at in steps(scalars).items() if not tag.startswith(at_ends)}
