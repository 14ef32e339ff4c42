"""Strict by default: float64, no silent promotion, eight simulated devices, types checked at run time."""

import os
from pathlib import Path

import pytest

# Small matrices: a second thread only waits, and there are two workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# On Intel CPUs that advertise AMX, torch's bfloat16 products die with an illegal instruction.  It reads this when it is
# imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Programs are kept from module to module and from run to run (a folder a worker, since an entry is not written
# atomically).
worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "programs" / worker))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

install_import_hook("commjax", "beartype.beartype")

from hypothesis import settings  # noqa: E402

settings.register_profile("commjax", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("commjax")


# The files that take longest start first, so that no worker is left with a long one at the end.
HEAVY = (
    "federation/test_flower",
    "conformance/test_devices",
    "experiments/test_notebooks",
    "experiments/test_cohort_squeeze",
    "experiments/test_fedp3",
    "devices/test_distributed_processes",
    "models/test_networks",
    "experiments/test_ef_bv",
    "experiments/test_scafflix",
    "compressors/test_certify",
    "algorithms/test_sppm_as",
    "conformance/test_sent",
    "conformance/test_algorithms",
    "algorithms/test_ef_bv",
    "compressors/test_selection",
    "compressors/test_format",
)


def order(item: pytest.Item) -> int:
    """The place of a test's file among the heavy ones, or after them all."""
    return next((place for place, file in enumerate(HEAVY) if item.nodeid.startswith(f"tests/{file}")), len(HEAVY))


# Three tiers, which files mark: `pytestmark = pytest.mark.slow` or `long`.  `pytest -m "not slow"` leaves out both,
# `pytest` the long ones, and `pytest -m long` runs only those.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=order)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)


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
