"""The length of a message is an exact integer, also where bits are no float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import ef_bv
from commjax.compressors import comp, identity, leafwise, m_nice, perm_k, rand_k, rounded, scaled, top_k, vectors
from commjax.federation import exchange
from commjax.federation.envelope import Header, seal
from commjax.federation.exchange import AbsentError, Contract
from tests.federation.exchange_cases import KEY

pytestmark = pytest.mark.long

LARGE = 2**24 + 1  # parameters: 32 times as many bits are no float32
LENGTHS = [
    (identity(), 4 * LARGE),
    (top_k(2**22 + 1), 4 * (2**22 + 1) + -(-LARGE // 8)),  # more than a quarter: a bitmap
    (rand_k(2**23 + 1), 4 * (2**23 + 1)),
    (scaled(0.5, identity()), 4 * LARGE),
    (rounded(identity(), jnp.bfloat16), 2 * LARGE),
    (leafwise(identity()), 4 * LARGE),
    (m_nice(1, identity()), 4 * LARGE),
]


@pytest.mark.parametrize("compressor, size", LENGTHS, ids=lambda one: getattr(one, "name", None))
def test_lengths_are_exact_integers_where_bits_are_no_float32(compressor, size):
    like = jax.ShapeDtypeStruct((LARGE,), np.float32)
    assert vectors.payload_bytes(compressor, KEY, like, 0, 1) == size
    assert isinstance(vectors.payload_bytes(compressor, KEY, like, 0, 1), int)
    assert int(np.float32(32 * LARGE)) != 32 * LARGE  # the ledger, where it is float32


@pytest.mark.parametrize(
    "compressor", [perm_k(), m_nice(2, top_k(3)), comp(2, 5), leafwise(m_nice(2, perm_k())), leafwise(top_k(2))]
)
def test_the_length_of_a_message_is_that_of_its_bytes(compressor):
    x = {"a": jnp.arange(8.0, dtype=jnp.float32), "b": jnp.ones((3, 1), jnp.float32)}
    for number in range(4):
        key = jax.random.fold_in(KEY, number)
        for i in range(3):
            data = compressor.encode(key, x, i, 3)
            assert compressor.length(key, x, i, 3) == len(data)
            # What a compressor of one's own, without `length`, falls back to.
            assert vectors.payload_bytes(compressor._replace(length=None), key, x, i, 3) == len(data)


def test_an_honest_message_of_more_than_2_24_parameters_is_accepted():
    with jax.enable_x64(False):
        algorithm = ef_bv.gd(lambda x, data: (jnp.sum(x * data), jnp.full_like(x, data)))
        start = jnp.zeros(LARGE, jnp.float32)
        contract = Contract(algorithm, ef_bv.HParams(0.5, 1.0, 1.0), lambda ids: algorithm.init(start, ids), 1, KEY)
        server = contract.init(jnp.arange(1)).server
        payload = np.ones(LARGE, np.float32).tobytes()
        upload = seal(Header("up", exchange.fingerprint(contract), 0, 0), payload)
        server, report = exchange.close(contract, server, {0: upload})
        assert report.bits_up == report.bits_down == 32 * LARGE and np.unique(server.params).tolist() == [-0.5]
        with pytest.raises(AbsentError, match="client 0: oversized: "):
            exchange.close(contract, server._replace(round=server.round - 1), {0: upload + b"\0"})
