"""A model of 1.3 billion parameters is pruned in less than 3 GB.  COMMJAX_LARGE=1 runs it (minutes, 8 GB of disk)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from commjax.llm import checkpoints, config, export, names
from commjax.llm.architectures import model
from commjax.pruning import stream

ROOT = Path(__file__).parents[2]
OPT_1_3B = {"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "word_embed_proj_dim": 2048, "torch_dtype": "bfloat16"}  # fmt: skip
SCRIPT = """
import sys
import numpy as np
from commjax.pruning import stream
from commjax.pruning.recipe import Recipe

windows = np.random.default_rng(0).integers(0, 50272, (2, 64)).astype(np.int32)
stream.prune_folder(sys.argv[1], sys.argv[2], windows, Recipe(sparsity=0.5), batch_size=2)
print(*(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def write(folder):
    """The checkpoint in one file, the harder case; how many parameters it has."""
    opt, random = model(config.from_json(OPT_1_3B)), np.random.default_rng(0)
    folder.mkdir()
    export.write_json(folder / "config.json", config.to_json(opt.config))
    tensors = {
        name: (0.02 * random.standard_normal(shape, np.float32)).astype(jnp.bfloat16)
        for name, shape in names.tensor_shapes(opt).items()
    }
    export.write_tensors(folder / checkpoints.WEIGHTS, tensors)
    return sum(tensor.size for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.skipif("COMMJAX_LARGE" not in os.environ, reason="COMMJAX_LARGE is not set")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read where Linux says it")
def test_a_model_of_1_3_billion_parameters_takes_less_than_3_gigabytes(tmp_path):
    assert write(tmp_path / "source") == pytest.approx(1.3e9, rel=0.02)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    began = time.monotonic()
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=True, timeout=3000)
    peak = int(done.stdout.split()[-1])
    print(f"peak {peak / 1e9:.2f} GB, {time.monotonic() - began:.0f} s")
    assert peak < 3e9
    layers = stream.layers_of(stream.read_manifest(tmp_path / "out"))
    assert len(layers) == 24 * 6 and all(layer.sparsity >= 0.5 and 0 < layer.error < 1 for layer in layers)
