"""What every run of the tests needs.

tests/files: what each file of cleanrl/ must do; tests/families: what some of them do besides; tests/tools: the tools
around them; tests/helpers: what these share, and the probe environments, which a run finds as probe_envs:NAME-v0.
"""

import ctypes
import sys
from ctypes.util import find_library

import pytest

from helpers.files import HELPERS, ROOT

sys.path[:0] = [str(ROOT), str(HELPERS)]  # for `from cleanrl.ppo import gae`, and for probe_envs:NAME-v0


try:  # Procgen needs Qt before anything imports EnvPool, and tests share a process: as in ppo_procgen.py
    import PyQt5

    for library in ("Core", "Gui") if find_library("Qt5Gui") is None else ():
        ctypes.CDLL(f"{PyQt5.__path__[0]}/Qt5/lib/libQt5{library}.so.5")
except (ImportError, OSError):
    pass


def pytest_collection_modifyitems(items):
    if any(item.get_closest_marker("cuda") for item in items):
        import torch

        if not torch.cuda.is_available():  # hardware, unlike a package, cannot be installed: a skip in any case
            for item in items:
                if item.get_closest_marker("cuda"):
                    item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
