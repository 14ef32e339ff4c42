"""The transformer example on a tiny model: it prints what it says, and its exit status is its verdict."""

import jax
import numpy as np
import pytest

from experiments import transformer

pytestmark = pytest.mark.long

TINY = transformer.Settings(
    clients=2, batch=2, length=8, width=8, layers=1, heads=1, steps=3, longer=2, share=0.1, margin=100.0, progress=False
)


@pytest.fixture
def as_it_is_run():
    """float32 and JAX's own promotion, which Flax's layers count on."""
    ours = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in ours}
    for name, value in ours.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
def test_both_runs_train_and_the_bits_of_the_compressed_one_are_fewer(as_it_is_run, capsys):
    results = transformer.main(TINY)
    plain, compressed = results["plain"], results["compressed"]
    assert (plain["steps"], compressed["steps"]) == (3, 6) and plain["d"] == compressed["d"]
    assert plain["bits"] == 32 * plain["d"]
    assert 0 < compressed["bits"] < 0.3 * plain["bits"]
    for result in results.values():
        assert 0 < result["held-out loss"] < 2 * np.log(128)
    assert ", within the margin of 100.0" in capsys.readouterr().out


@pytest.mark.parametrize("gap, status", [(0.04, 0), (0.06, 1), (float("nan"), 1)])
def test_the_exit_status_says_whether_the_margin_was_kept(gap, status, monkeypatch):
    results = {"plain": {"held-out loss": 2.0}, "compressed": {"held-out loss": 2.0 + gap}}
    monkeypatch.setattr(transformer, "main", lambda settings: results)
    assert transformer.status(transformer.Settings(margin=0.05)) == status
