"""On a GPU, a captured run computes what an eager one does, with fresh random numbers and the weights of the moment."""

import numpy as np
import pytest

from helpers.files import each, require_for, script, smoke, step_sizes, uses
from helpers.processes import environment, inspect_run

captured_files = each(lambda name: uses(name, "torch") and "cuda_graph(" in script(name).read_text())
pytestmark = pytest.mark.cuda

# A replayed graph runs no Python, so a hook inside an update would not be called: the losses, sums in a buffer on the
# device that each update adds to, are recorded where the loop reads them.
RECORD = """
import numpy as np
import torch

result["losses"] = []
tolist = torch.Tensor.tolist


def record(self):
    values = tolist(self)
    if self.is_cuda and self.ndim == 1 and 2 <= len(values) <= 16 and self.dtype == torch.float32:
        result["losses"].extend(values)
    return values


torch.Tensor.tolist = record
"""
STATE = """
import inspect


def all_weights():
    names = [name for name in ("weights", "actor_weights", "qf_weights") if name in globals()]
    return torch.cat([globals()[name].detach() for name in names])


def again(function):
    # a captured function once more, with the arguments of the last time
    return function(*inspect.getclosurevars(function).nonlocals["inputs"])


def step():
    # one more gradient step; returns what is logged of it
    if "gradient" in globals():  # two graphs, between which processes meet
        logged = again(gradient)
        again(descend)
    else:
        logged = again(update if "update" in globals() else update_qf)
    parts = logged if isinstance(logged, tuple) else (logged,)
    return next(part for part in parts if isinstance(part, dict))


result["device"] = device.type
result["weights"] = all_weights().cpu().numpy()
"""


def run_on_gpu(name, cwd, *flags, before="", after="", **changes):
    require_for(name)
    cwd.mkdir(exist_ok=True)
    argv = [*smoke(name, **changes), *flags]
    result = inspect_run(script(name), *argv, cwd=cwd, before=before, after=STATE + after, env=environment(gpu=True))
    assert result["device"] == "cuda"
    return result


@captured_files
def test_captured_equals_eager(name, tmp_path):
    """The random numbers of a captured generator continue those of an eager one, so whole short runs can be compared.

    Rounding differs between the two by the order of sums at most; a small step size keeps actions from flipping.
    """
    changes = step_sizes(name, 1e-5)
    eager = run_on_gpu(name, tmp_path / "eager", "--no-cuda-graphs", before=RECORD, **changes)
    captured = run_on_gpu(name, tmp_path / "captured", "--cuda-graphs", before=RECORD, **changes)
    assert len(eager["losses"]) == len(captured["losses"]) >= 2
    np.testing.assert_allclose(captured["losses"], eager["losses"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(captured["weights"], eager["weights"], rtol=1e-3, atol=1e-5)


@captured_files
def test_the_seed_decides_on_the_gpu_too(name, tmp_path):
    first, again, other = (
        run_on_gpu(name, tmp_path / folder, before=RECORD, seed=seed) for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    np.testing.assert_allclose(first["losses"], again["losses"], rtol=1e-3, atol=1e-5)
    assert not np.allclose(first["losses"], other["losses"], rtol=1e-3, atol=1e-5)


LOOK = """
torch.cuda.synchronize()
before = all_weights()
step()
torch.cuda.synchronize()
result["moved"] = (all_weights() - before).abs().max().item()

if "agent" in globals() and "actor_optimizer" not in globals():  # PPO draws actions inside the graph
    result["distinct"] = len({again(act).float().cpu().numpy().tobytes() for _ in range(50)})
elif "inds" in globals():  # PQN draws nothing inside a graph
    result["distinct"] = 2
else:  # DQN and others draw their minibatches inside the graph
    sums = [[value.item() for value in step().values()] for _ in range(20)]
    result["distinct"] = len(set(map(tuple, sums)))

# `act` follows weights that have changed since its capture: make one action certain, then another
chosen = []
if hasattr(globals().get("agent"), "choices"):
    inspect.getclosurevars(act).nonlocals["inputs"][0].fill_(1)  # all are valid
with torch.no_grad():
    for sign in (1, -1) if "act" in globals() else ():  # Ape-X acts elsewhere
        if "agent" in globals() and hasattr(agent, "actor_logstd"):
            bias = list(agent.actor_mean if hasattr(agent, "actor_mean") else agent.actor)[-1].bias
            bias.fill_(sign * 1000.0)
        else:
            head = q_network if "q_network" in globals() else agent.actor
            bias = [layer for layer in head.modules() if isinstance(layer, nn.Linear)][-1].bias
            bias.fill_(0.0)
            atoms = args.n_atoms if "support" in globals() else 1  # the last atom of an action has the highest value
            bias[(1 if sign > 0 else 2) * atoms - 1] = 1e6
            if hasattr(head, "low"):  # continuous, between bounds
                bias.fill_(sign * 1000.0)
        action = again(act)
        halves = action < (head.low + head.high) / 2 if "head" in globals() and hasattr(head, "low") else action
        chosen.append(halves.float().cpu().numpy().copy())
result["chosen"] = chosen
"""


@captured_files
def test_replays_are_fresh_and_see_the_weights(name, tmp_path):
    result = run_on_gpu(name, tmp_path, after=LOOK)
    assert 0 < result["moved"] < 1
    assert result["distinct"] > 1, "each replay repeats the same random numbers"
    if not result["chosen"]:
        return
    one, other = result["chosen"]
    if "actor_logstd" in script(name).read_text():
        assert (one > 100).all() and (other < -100).all()
    else:
        assert (one == 0).all() and (other == 1).all()


TWICE = """
losses = globals().get("losses") or qf_means  # what `step` adds to
losses.take()
for key in ("first", "second"):
    logged = step()
    torch.cuda.synchronize()
    result[key] = [value.item() for value in logged.values()]
result["means"] = [*losses.take().values()]
"""


@captured_files
def test_what_a_person_asks_for_is_there_when_captured(name, tmp_path):
    """Tensors made during the capture stay readable, and show the last update: not those of the capture itself."""
    result = run_on_gpu(name, tmp_path, after=TWICE)
    assert np.isfinite(result["first"]).all()
    assert result["first"] != result["second"], "the values are stale"
    np.testing.assert_allclose(result["means"], np.mean([result["first"], result["second"]], axis=0), rtol=1e-3)


@captured_files
def test_captured_run_resumes(name, tmp_path):
    """A run that was cut short and resumed on the GPU ends with finite losses at the same number of steps."""
    result = run_on_gpu(name, tmp_path, before=RECORD)
    (folder,) = (tmp_path / "runs").iterdir()
    total = 2 * int(smoke(name)[smoke(name).index("--total-timesteps") + 1])
    more = inspect_run(
        script(name),
        *("--resume", folder, "--total-timesteps", total),
        cwd=tmp_path,
        before=RECORD,
        after=STATE + "result['global_step'] = global_step",
        env=environment(gpu=True),
    )
    assert more["device"] == "cuda" and more["global_step"] == total
    assert np.isfinite(result["losses"]).all() and np.isfinite(more["losses"]).all()
    assert np.abs(more["weights"] - result["weights"]).max() > 0
