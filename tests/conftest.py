"""Strict by default: float64, no silent promotion, eight simulated devices, types checked at run time."""

import importlib.util
import mmap
import os
from pathlib import Path

import pytest

# Small matrices: a second thread only waits, and there are two workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Half of the suite's time is compilation, and a third of that the newer emitters of fused loops; a version of XLA without this
# option would refuse to start with it.
OPTION = "xla_cpu_use_fusion_emitters"
jaxlib = importlib.util.find_spec("jaxlib")
for library in Path(jaxlib.submodule_search_locations[0] if jaxlib else ".").glob("libjax_common.so"):
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        if text.find(OPTION.encode()) >= 0:
            os.environ["XLA_FLAGS"] = f"--{OPTION}=false {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Programs are kept from module to module and from run to run (a folder a worker, since an entry is not written atomically).
worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "programs" / worker))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

install_import_hook("commjax", "beartype.beartype")

from hypothesis import settings  # noqa: E402

settings.register_profile("commjax", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("commjax")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Thousands of programs in one process exhaust its memory maps, and the compiler crashes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def compile_quickly():
    """Many tiny programs are compiled; XLA's optimisations would double the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def real_data() -> str:
    """The folder with the LibSVM files, or a skip: tests on real data run where COMMJAX_DATA says."""
    folder = os.environ.get("COMMJAX_DATA")
    if not folder:
        pytest.skip("COMMJAX_DATA is not set")
    return folder
