"""What goes on the wire: every message has exactly the stated bits, and comes back bit for bit."""

import math
from functools import cache
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commjax.compressors import comp, identity, index_codes, leafwise, m_nice, perm_k, rand_k, scaled_sign, top_k, wire
from commjax.compressors.joint import _block
from commjax.core import conventions
from tests.compressors.zoo import ZOO, cloud

D, N = 12, 3
ALL = pytest.mark.parametrize("name", ZOO)
KEY = jax.random.key(4)


def same_bits(a, b):
    a, b = (np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(t)]) for t in (a, b))
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@cache
def compiled(name):
    return jax.jit(lambda x, id: ZOO[name].compress(KEY, x, id, N))


def check(name, x, id, messages):
    compressor = ZOO[name]
    data = compressor.encode(KEY, x, id, N)
    value = compressor.decode(KEY, data, jax.tree.map(jnp.zeros_like, x), id, N)
    assert jax.tree.structure(value) == jax.tree.structure(x)
    for message in messages:
        assert 8 * len(data) == float(message.bits)
        assert same_bits(value, message.value)


@pytest.mark.parametrize("name", [name for name in ZOO if "dithering" in name or "sign" in name or "nice" in name])
def test_products_and_sums_are_the_same_bits_under_jit_in_double_precision(name):
    for seed in range(4):
        x = jnp.asarray(cloud(seed, 1, D)[0], jnp.float64)
        check(name, x, seed % N, [compiled(name)(x, seed % N)])


ENTRY = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.75, -3.0, 1e-3, -1e4]) | st.floats(-1e6, 1e6, width=32)


@ALL
@settings(max_examples=6)
@given(st.lists(ENTRY, min_size=D, max_size=D), st.integers(0, N - 1))
@example([0.0] * D, 0)
@example([-0.0] * D, 1)
@example([-0.0, 0.0, -1.0, 1.0, -0.0, 0, 0, 0, 0, 0, 0, 0], 2)
def test_zeros_signs_and_ties_come_back(name, entries, id):
    x = jnp.asarray(np.array(entries, np.float32))
    check(name, x, id, [compiled(name)(x, id)])


@pytest.mark.parametrize("entry", [0.0, -0.0, 2.5, -1e-38])
def test_one_dimension_is_enough(entry):
    for compressor in [
        identity(),
        top_k(1),
        rand_k(1),
        comp(1, 1),
        perm_k(),
        m_nice(1),
        scaled_sign(),
        leafwise(top_k(1)),
    ]:
        x = jnp.full(1, entry, jnp.float32)
        for id in range(2):
            message, data = compressor.compress(KEY, x, id, 2), compressor.encode(KEY, x, id, 2)
            assert 8 * len(data) == float(message.bits)
            assert same_bits(compressor.decode(KEY, data, x, id, 2), message.value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_sign_of_a_mean_that_underflows_is_kept(dtype):
    x = -jnp.asarray([1.2e-38, 0, 0, 0], dtype)
    data = scaled_sign().encode(KEY, x)
    assert same_bits(scaled_sign().decode(KEY, data, x), scaled_sign().compress(KEY, x).value)


@pytest.mark.parametrize("d,n", [(12, 3), (13, 3), (3, 7)])
def test_perm_k_sends_what_it_owns_and_all_is_sent_once(d, n):
    x = jnp.arange(1.0, d + 1)
    sent = [len(perm_k().encode(KEY, x, id, n)) // 8 for id in range(n)]
    assert sum(sent) == max(d, n) and max(sent) - min(sent) <= 1
    assert [float(perm_k().compress(KEY, x, id, n).bits) for id in range(n)] == [64 * s for s in sent]


@pytest.mark.parametrize("items,blocks", [(1_000_003, 3000), (12, 3), (13, 3), (7, 7), (5, 1), (11, 6)])
def test_blocks_differ_by_one_at_most_and_nothing_overflows(items, blocks):
    block = np.asarray(_block(jnp.arange(items, dtype=jnp.int32), items, blocks))  # items * blocks > 2^31 in the first
    assert block.dtype == np.int32 and np.all(np.diff(block) >= 0)
    counts = np.bincount(block)
    assert len(counts) == blocks and set(counts) <= {items // blocks, -(-items // blocks)}


@ALL
def test_damaged_messages_are_refused_or_are_valid_vectors(name):
    rng = np.random.default_rng(0)
    compressor, like = ZOO[name], jnp.zeros(D, jnp.float32)
    x = jnp.asarray(cloud(9, 1, D)[0], jnp.float32)
    id = next(i for i in range(N) if compressor.encode(KEY, x, i, N))
    data = compressor.encode(KEY, x, id, N)
    refused = 0
    for trial in range(90):
        damaged = bytearray(data)
        if trial % 3 == 0:
            damaged = damaged[: rng.integers(len(data))]
        elif trial % 3 == 1:
            damaged += rng.bytes(rng.integers(1, 5))
        else:
            for bit in rng.integers(0, 8 * len(data), rng.integers(1, 9)):
                damaged[bit // 8] ^= 1 << bit % 8
        try:
            value = compressor.decode(KEY, bytes(damaged), like, id, N)
        except ValueError as error:
            assert str(error)
            refused += 1
        else:
            assert len(damaged) == len(data) and value.shape == like.shape and value.dtype == like.dtype
    assert refused >= 60


@settings(max_examples=150)
@given(st.integers(1, 3000), st.data())
def test_index_sets_come_back_at_the_stated_price(d, data):
    k = data.draw(st.integers(1, d))
    seed = data.draw(st.integers(0, 2**32 - 1))
    indices = np.sort(np.random.default_rng(seed).choice(d, k, replace=False))
    code = wire.encode_indices(indices, d)
    assert 8 * len(code) == wire.whole_bytes(wire.index_code(d, k).bits)
    np.testing.assert_array_equal(wire.decode_indices(code, d, k), indices)


@pytest.mark.parametrize("d,k,name", [(112, 56, "rank"), (112, 84, "bitmap"), (2000, 80, "elias-fano"), (9, 9, "all")])
def test_every_index_code_holds_its_extreme_sets_and_refuses_wrong_ones(d, k, name):
    assert wire.index_code(d, k).name == name
    for indices in (np.arange(k), np.arange(d - k, d)):
        np.testing.assert_array_equal(wire.decode_indices(wire.encode_indices(indices, d), d, k), indices)
    data = wire.encode_indices(np.arange(d - k, d), d)
    with pytest.raises(ValueError):
        wire.decode_indices(data + b"\0", d, k)
    if name != "all":
        with pytest.raises(ValueError, match=r"position|filled up"):
            wire.decode_indices(b"\xff" * len(data), d, k)


@pytest.mark.parametrize("first,last", [(1, 0), (0, 0), (None, 2000)], ids=["decreasing", "twice", "too large"])
def test_elias_fano_positions_must_increase_and_be_below_d(first, last):
    positions = np.arange(0, 1600, 20)
    if first is None:
        positions[-1] = last
    else:
        positions[:2] = first, last  # both have the same upper bits
    assert wire.index_code(2000, 80).name == "elias-fano"
    with pytest.raises(ValueError, match="80 increasing positions below 2000"):
        wire.decode_indices(wire.encode_indices(positions, 2000), 2000, 80)


@pytest.mark.parametrize("d,k", [(5, 2), (7, 6), (9, 4), (6, 1)])
def test_a_rank_numbers_all_sets_from_zero_and_every_larger_number_is_refused(d, k):
    sets = sorted(combinations(range(d), k), key=lambda positions: positions[::-1])
    bits = wire.index_code(d, k).bits
    assert wire.index_code(d, k).name == "rank" and 2 ** (bits - 1) < len(sets) <= 2**bits
    for rank, positions in enumerate(sets):
        assert wire.encode_indices(np.array(positions), d) == bytes([rank])
        assert wire.decode_indices(bytes([rank]), d, k).tolist() == list(positions)
    for rank in range(len(sets), 2**bits):
        with pytest.raises(ValueError, match=f"{k} positions below {d} must be below {len(sets)}, got {rank}"):
            wire.decode_indices(bytes([rank]), d, k)


@pytest.mark.parametrize("d", [65, 129, 1000, 10**6, 10**9])
@pytest.mark.parametrize("k", [1, 2, 33, 64])
def test_ranks_next_to_a_binomial_coefficient_come_back(d, k):
    """The decoder starts from a guess in floating point: it must not be off by one where C(c, k) begins."""
    for c in (c for c in (k, k + 1, 2 * k, d // 2, d - 1) if k <= c < d):
        for rank in {math.comb(c, k) - 1, math.comb(c, k), math.comb(d, k) - 1}:
            indices = index_codes._unrank(rank, d, k)
            assert np.all(np.diff(indices) > 0) and indices[0] >= 0 and indices[-1] < d
            assert index_codes._rank(indices) == rank
        assert index_codes._unrank(math.comb(c, k), d, k)[-1] == c
        assert index_codes._unrank(math.comb(c, k) - 1, d, k)[-1] == c - 1


@pytest.mark.parametrize("d", [66, 100, 112, 1000, 10**5, 10**6])
@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32, 64])
def test_no_code_of_whole_bytes_is_shorter_for_64_values_or_fewer(d, k):
    sets = math.comb(d, k)
    assert 2 ** (wire.sparse_bits(d, k, 32) - 32 * k - 8) < sets <= 2 ** (wire.sparse_bits(d, k, 32) - 32 * k)
    assert wire.sparse_bits(d, k, 32) < wire.information_floor(d, k) + 8


def test_beyond_64_values_the_message_is_within_3_2_per_cent_of_the_bound():
    def ratio(d, k):
        return wire.sparse_bits(d, k, 32) / wire.information_floor(d, k)

    sizes = [*range(66, 300), *(int(300 * 1.5**i) for i in range(20))]
    pairs = [
        (d, int(k)) for d in sizes for k in {*np.geomspace(65, d, 40).astype(int), *range(max(65, d - 9), d), d // 2}
    ]
    pairs = [(d, k) for d, k in pairs if k > 64]
    worst = max(pairs, key=lambda pair: ratio(*pair))
    assert 1.031 < ratio(*worst) <= 1.032 and worst[1] == worst[0] - 1
    assert max(ratio(d, k) for d, k in pairs if k <= 0.9 * d) <= 1.027


def test_the_price_of_the_example_is_that_of_the_conventions():
    d, k = 1_663_370, 16_634
    assert 32 * k + wire.index_code(d, k).bits == 674_717  # conventions.md; each field is then filled up to bytes
    assert wire.sparse_bits(d, k, 32) == 674_720
    assert wire.sparse_bits(d, k, 32) / wire.information_floor(d, k) == pytest.approx(1.0115, abs=1e-3)
    table = {
        "32k": 532_288,
        "32k+log d": 532_309,
        "k(32+log d)": 881_602,
        "64k": 1_064_576,
        "96k": 1_596_864,
        "d+32k": 2_195_658,
    }
    assert {name: conventions.legacy_bits(name, d, k) for name in conventions.LEGACY} == table
    assert conventions.legacy_bits("32k", d, 1.5) == 48


def test_the_floor_is_the_logarithm_of_the_number_of_sets():
    assert wire.information_floor(10, 3) == pytest.approx(96 + math.log2(math.comb(10, 3)))
    assert wire.information_floor(10, 3, 64) == pytest.approx(192 + math.log2(math.comb(10, 3)))


def test_each_price_is_the_sum_of_its_parts():
    x = jnp.ones(D, jnp.float32)
    prices = {
        "identity": 12 * 32,
        "rand-2": 2 * 32,
        "top-2": 2 * 32 + 8,  # one of 66 sets
        "comp-(1,3)": 32 + 8,
        "mix-(1,2)": 3 * 32 + 8,  # only the largest needs a position
        "natural": 112,  # 9 bits each, whole bytes
        "ternary(p=inf)": 32 + 24,  # five digits of base 3 a byte
        "dithering(3,p=2)": 32 + 48,  # up to 17 digits of base 7 in six bytes
        "scaled sign": 32 + 16,
        "perm-k": 4 * 32,
        "leafwise(function of size)": 6 * 32,
        "rand-2 in float32": 2 * 32,
    }
    assert {name: float(compiled(name)(x, 0).bits) for name in prices} == prices
    assert sum(float(compiled("2-nice")(x, id).bits) for id in range(N)) == 2 * 12 * 32


@settings(max_examples=60)
@given(st.integers(2, 5000), st.integers(1, 40), st.integers(0, 2**32 - 1))
@example(2, 9, 0)
@example(256, 9, 0)
@example(2**32, 5, 0)
@example(2**64, 3, 0)
def test_digits_come_back_at_the_stated_price(base, d, seed):
    digits, size = wire.radix_block(base)
    assert base**digits <= 2 ** (8 * size) and 1 <= size <= 8
    for other in range(1, 9):  # no block of whole bytes wastes less
        assert size / digits <= other / max(1, math.floor(8 * other / math.log2(base) + 1e-9)) or base > 2 ** (
            8 * other
        )
    if base == 2**64:
        return
    values = np.random.default_rng(seed).integers(0, base, d, dtype=np.uint64)
    values[0] = base - 1
    data = wire.encode_digits(values, base)
    assert 8 * len(data) == wire.radix_bits(d, base)
    np.testing.assert_array_equal(wire.decode_digits(data, d, base), values)
