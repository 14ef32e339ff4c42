import jax
import pytest


@pytest.fixture
def compile_quickly():
    """Many tiny programs are compiled; XLA's optimisations would double the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
