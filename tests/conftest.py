"""Strict by default: float64, no silent promotion, eight simulated devices, types checked at run time."""

import os

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

install_import_hook("commjax", "beartype.beartype")

from hypothesis import settings  # noqa: E402

settings.register_profile("commjax", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("commjax")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Thousands of programs in one process exhaust its memory maps, and the compiler crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def real_data() -> str:
    """The folder with the LibSVM files, or a skip: tests on real data run where COMMJAX_DATA says."""
    folder = os.environ.get("COMMJAX_DATA")
    if not folder:
        pytest.skip("COMMJAX_DATA is not set")
    return folder
