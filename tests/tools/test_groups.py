"""Tests that share a costly fixture run in one worker (tests/conftest.py), or each worker would make its own."""

import pytest


@pytest.mark.xdist_group("together")
def test_a_group_is_known_to_the_workers(request, pytestconfig):
    grouped = getattr(pytestconfig.option, "loadgroup", False)  # --dist loadgroup
    assert request.node.nodeid.endswith("@together") == grouped, "this pytest and this pytest-xdist do not go together"
