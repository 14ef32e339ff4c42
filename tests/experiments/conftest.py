"""Fixtures of the experiments."""

import pytest

from commjax.core import compiled


@pytest.fixture
def no_sweep(monkeypatch):
    """Function that makes every sweep from then on fail: a finished run must not be run again."""

    def again(*inputs, **options):
        raise AssertionError("a finished run was run again")

    return lambda: monkeypatch.setattr(compiled, "sweep_in_place", again)
