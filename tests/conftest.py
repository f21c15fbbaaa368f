"""What every run of the tests needs.

tests/files: what each file of cleanrl/ must do; tests/families: what some of them do besides; tests/tools: the tools
around them; tests/helpers: what these share, and the probe environments, which a run finds as probe_envs:NAME-v0.
"""

import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy: tests run side by side, and threads of one would wait for others
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell; runs under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

from helpers import forks
from helpers.files import HELPERS, ROOT
from helpers.processes import SHORT, begin_forks

sys.path[:0] = [str(ROOT), str(HELPERS)]  # for `from cleanrl.ppo import gae`, and for probe_envs:NAME-v0
os.environ |= SHORT  # what is compiled within a test
forks.load_qt()  # tests share a process
if "CLEANRL_FORKS" not in os.environ and hasattr(os, "fork"):  # workers inherit it
    begin_forks()

# Fixtures of a module that take seconds: with --dist loadgroup, tests that share one run in one worker
COSTLY = {"aws", "awkward", "batch", "built", "chromium", "clone", "original", "site", "slurm_cluster", "trained"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "tools" not in item.path.parts)  # those that wait for others begin early
    for item in items:
        if COSTLY & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if any(item.get_closest_marker("cuda") for item in items):
        import torch

        if not torch.cuda.is_available():  # hardware, unlike a package, cannot be installed: a skip in any case
            for item in items:
                if item.get_closest_marker("cuda"):
                    item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


def pytest_addoption(parser):
    told = "after the tests, the processor time and the wall time of each file of tests, and of each test in this file"
    parser.addoption("--cpu-times", nargs="?", const=os.devnull, metavar="CSV", help=told)


HANDLED = "SIGPIPE", "SIGINT", "SIGTERM"  # a tool that is called by a test may set them, and would end a later test


def cpu_seconds(pid="self"):
    """Of a process, of all that it has waited for, and of its children that still run."""
    try:
        spent = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
        children = [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").open().read().split()
        ]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0.0
    return spent / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def cpu_now():
    """Of this process, and of its forks, which are not its children where it is a worker."""
    return cpu_seconds() + (forks.spent if "PYTEST_XDIST_WORKER" in os.environ else 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.cpu_began = cpu_now() if item.config.getoption("cpu_times") else None
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in HANDLED if hasattr(signal, name)}
    outcome = yield
    for name, handler in handlers.items():
        signal.signal(getattr(signal, name), handler)
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and item.cpu_began is not None:
        item.user_properties.append(("cpu", cpu_now() - item.cpu_began))
    return (yield)


TIMES = defaultdict(lambda: [0.0, 0.0])  # a test -> its seconds of processor and wall time


def pytest_runtest_logreport(report):
    TIMES[report.nodeid][1] += report.duration
    TIMES[report.nodeid][0] += dict(report.user_properties).get("cpu", 0.0) if report.when == "teardown" else 0.0


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("cpu_times"):
        return
    lines = [
        f"{cpu:.2f},{wall:.2f},{test}" for test, (cpu, wall) in sorted(TIMES.items(), key=lambda pair: -pair[1][0])
    ]
    Path(config.getoption("cpu_times")).write_text("\n".join(["cpu,wall,test", *lines, ""]))
    rooms = defaultdict(lambda: [0.0, 0.0])
    for test, seconds in TIMES.items():
        file = test.split("::")[0]
        for room in ("all", str(Path(file).parent), file):
            rooms[room] = [old + new for old, new in zip(rooms[room], seconds)]
    terminalreporter.section("seconds of processor and of wall time")
    for room, (cpu, wall) in sorted(rooms.items(), key=lambda pair: -pair[1][0]):
        terminalreporter.write_line(f"{cpu:8.1f} {wall:8.1f} {room}")
