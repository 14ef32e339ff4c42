"""What is sent is what is kept, also where sets come from a permutation and rows are taken one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import comp, mix, perm_k, rand_k, selection, top_k


@pytest.mark.parametrize("d", [1030, 5001, selection._LARGE + 7])
@pytest.mark.parametrize(
    "compressor",
    [top_k(50), rand_k(40), rand_k(900), comp(40, 90), comp(40, 1025), mix(30, 40), perm_k()],
    ids=lambda c: c.name,
)
def test_the_jitted_value_is_the_decoded_one_and_the_bits_are_the_bytes(compressor, d):
    n, key = 3, jax.random.key(5)
    x = jnp.asarray(np.random.default_rng(d).standard_normal((n, d)), jnp.float32)
    sent = jax.jit(jax.vmap(lambda id, row: compressor.compress(key, row * 1.7 - 0.3, id, n)))(jnp.arange(n), x)
    for id in range(n):
        row = jax.jit(lambda row: row * 1.7 - 0.3)(x[id])
        data = compressor.encode(key, row, id, n)
        np.testing.assert_allclose(sent.value[id], compressor.decode(key, data, row, id, n), rtol=1e-6)
        assert sent.bits[id] == 8 * len(data)
        assert int((sent.value[id] != 0).sum()) == int(compressor.kept(d, n)) or compressor.name == "perm-k"
