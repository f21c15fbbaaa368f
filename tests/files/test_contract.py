"""tests/helpers/contract.py, what tests know of main blocks: short, true of the files, and kept."""

import pytest

from helpers import contract
from helpers.files import FILES, script
from helpers.processes import inspect_run


def test_each_name_is_there():
    made = set().union(*(contract.made_by_main(script(name)) for name in FILES))
    assert contract.CONTRACT <= made and len(contract.CONTRACT) < 110


def test_other_names_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="names of ppo.py's main block that .+ has not: {'num_more'}"):
        contract.made_by_main.cache_clear()
        file = tmp_path / "ppo.py"
        file.write_text("num = 1\nif __name__ == '__main__':\n    num_more = num\n")
        inspect_run(file, cwd=tmp_path, after="result['more'] = num + num_more")


def test_what_is_read():
    assert contract.read_by("x = f(y)\nfor z in x:\n    w(lambda v: v + z)") == {"f", "y", "w"}
