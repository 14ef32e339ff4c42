"""Damaged messages: an error with a reason or a valid vector, and nothing else, 10,000 times a compressor."""

import contextlib
import resource
import struct
import time
import tracemalloc
import zlib

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.algorithms.fedp3 import layers, plans, submodels
from commjax.algorithms.fedp3 import wire as fedp3_wire
from commjax.compressors import top_k, wire
from commjax.federation import envelope
from commjax.federation.envelope import HEADER_BYTES, Header, RefusedError, seal, unseal
from tests.compressors.zoo import ZOO, cloud

pytestmark = pytest.mark.long

D, N, TRIALS = 12, 3, 10_000
KEY = jax.random.key(4)
LIKE = np.zeros(D, np.float32)
ALL = pytest.mark.parametrize("name", ZOO)


@pytest.fixture
def types_unchecked():
    """As in production; the checks would take two thirds of the time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def mutations(data: bytes, seed: int, trials: int):
    """Flipped bits, other bytes, cuts, insertions, repetitions, noise: of the same length in half of all cases."""
    rng = np.random.default_rng(seed)
    for trial in range(trials):
        found = bytearray(data)
        at = int(rng.integers(len(data)))
        how = trial % 10
        if how < 3:
            for bit in rng.integers(0, 8 * len(data), rng.integers(1, 9)):
                found[bit // 8] ^= 1 << bit % 8
        elif how == 3:
            found[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif how == 4:
            found = bytearray(rng.bytes(len(data)))
        elif how == 5:
            del found[at:]
        elif how == 6:
            found[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif how == 7:
            found += found[at:]
        elif how == 8:
            found += bytes(int(rng.integers(1, 4000)))
        else:
            del found[at : at + int(rng.integers(1, 5))]
        yield bytes(found)


def encoded(name):
    x = jnp.asarray(cloud(9, 1, D)[0], jnp.float32)
    messages = ((id, ZOO[name].encode(KEY, x, id, N)) for id in range(N))
    return next((id, data) for id, data in messages if data)


@ALL
def test_a_damaged_message_is_refused_or_is_a_valid_vector(name, types_unchecked):
    id, data = encoded(name)
    decode = ZOO[name].decode
    decode(KEY, data, LIKE, id, N)  # compiled, before memory is measured
    refused, slowest = 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for damaged in mutations(data, 0, TRIALS):
        began = time.thread_time()
        try:
            value = decode(KEY, damaged, LIKE, id, N)
        except ValueError as error:
            assert str(error)
            refused += 1
        else:
            assert len(damaged) == len(data)
            assert value.shape == LIKE.shape and value.dtype == LIKE.dtype
        slowest = max(slowest, time.thread_time() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert refused >= TRIALS // 2 - 1 and slowest < 2.0
    assert grown < 32 * 1024  # kilobytes


@pytest.mark.parametrize("k, d, code, trials", [(70, 90, "bitmap", TRIALS), (80, 4096, "elias-fano", 2000)])
def test_damaged_indices_of_every_code_are_refused_or_name_k_coordinates_at_most(k, d, code, trials, types_unchecked):
    assert wire.index_code(d, k).name == code  # the zoo has ranks only
    compressor, like = top_k(k), np.zeros(d, np.float32)
    x = jnp.asarray(cloud(9, 1, d)[0], jnp.float32)
    data = compressor.encode(KEY, x)
    assert np.count_nonzero(compressor.decode(KEY, data, like)) == k
    refused = 0
    for damaged in mutations(data, 1, trials):
        try:
            value = np.asarray(compressor.decode(KEY, damaged, like))
        except ValueError as error:
            assert str(error)
            refused += 1
        else:
            assert len(damaged) == len(data) and value.shape == (d,) and np.count_nonzero(value) <= k
    assert trials // 2 <= refused < trials


@pytest.mark.parametrize("name", ["top-2", "natural", "dithering(3,p=2)", "leafwise(top-1)"])
def test_a_thousand_damaged_messages_leave_no_memory_behind(name):
    id, data = encoded(name)

    def decode_all(seed):
        for damaged in mutations(data, seed, 500):
            with contextlib.suppress(ValueError):
                ZOO[name].decode(KEY, damaged, LIKE, id, N)

    decode_all(0)
    tracemalloc.start()
    decode_all(1)
    first, _ = tracemalloc.get_traced_memory()
    decode_all(2)
    second, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert second - first < 64 * 1024 and peak < 2 * 1024 * 1024


def layers_of_fedp3():
    """What client 1 is sent, pruned by magnitude so that positions travel too, and what client 0 sends; with their
    readers"""
    rng = np.random.default_rng(2)
    params = {
        "a": {"kernel": jnp.asarray(rng.standard_normal((6, 5)))},
        "head": {"kernel": jnp.asarray(rng.standard_normal((5, 2)))},
    }
    plan, pruning = (
        plans.plan(layers.named(params, final="head"), [["a", "head"], ["head"]], 0.5),
        submodels.magnitude(),
    )
    server = submodels.server_masks(plan, pruning, KEY, params)
    sent, masks = submodels.sent(plan, plan.trained[1], KEY, 0, params, server)
    first, second = (fedp3_wire.format_of(plan, client, params, pruning=pruning) for client in range(2))
    down, up = fedp3_wire.write_down(second, sent, masks), fedp3_wire.write_up(first, params)
    return {
        "down": (down, lambda data: fedp3_wire.read_down(second, data, params), params),
        "up": (up, lambda data: fedp3_wire.read_up(first, data, params), params),
    }


@pytest.mark.parametrize("way", ["down", "up"])
def test_damaged_layers_of_fedp3_are_refused_or_are_layers(way, types_unchecked):
    data, read, params = layers_of_fedp3()[way]
    refused = 0
    for damaged in mutations(data, 5, 1000):
        try:
            found = read(damaged)
        except ValueError as error:
            assert str(error)
            refused += 1
        else:
            assert len(damaged) == len(data)
            assert [leaf.shape for leaf in jax.tree.leaves(found)] == [leaf.shape for leaf in jax.tree.leaves(params)]
    assert 500 <= refused < 1000


HEADER = Header("up", run=0xFEED, round=5, client=2, counted=4, loss=0.25)


def test_a_sealed_message_is_its_payload_behind_a_header_of_fixed_length():
    payload = bytes(range(50))
    data = seal(HEADER, payload)
    assert HEADER_BYTES == 44 and data[HEADER_BYTES:] == payload
    assert unseal(data, kind="up", run=0xFEED, limit=50) == (HEADER, payload)
    assert unseal(seal(HEADER, b""), kind="up", run=0xFEED, limit=0) == (HEADER, b"")
    # An oracle of the layout, field by field.
    assert data[:4] == b"cmjx" and int.from_bytes(data[4:6], "little") == 1 and data[6:8] == b"\2\0"
    assert struct.unpack("<QIIidI", data[8:40]) == (0xFEED, 5, 2, 4, 0.25, 50)
    assert int.from_bytes(data[40:44], "little") == zlib.crc32(data[:40] + payload)


@given(
    st.builds(
        Header,
        st.sampled_from(envelope.KINDS),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(-1, 2**31 - 1),
        st.floats(allow_nan=False),
    ),
    st.binary(max_size=40),
)
def test_every_header_comes_back(header, payload):
    assert unseal(seal(header, payload), kind=header.kind, run=header.run, limit=40) == (header, payload)


def resealed(data: bytes, **fields) -> bytes:
    """Other header fields with a right checksum: what a foreign program could send."""
    names = ("magic", "version", "kind", "run", "round", "client", "counted", "loss", "length")
    values = dict(zip(names, struct.unpack("<4sHHQIIidI", data[:40]))) | fields
    head = struct.pack("<4sHHQIIidI", *(values[name] for name in names))
    return head + struct.pack("<I", zlib.crc32(head + data[44:])) + data[44:]


SEALED = seal(HEADER, b"payload!")


@pytest.mark.parametrize(
    "data,reason",
    [
        (b"", "malformed: 0 bytes, a header alone has 44"),
        (SEALED[:43], "malformed: 43 bytes"),
        (SEALED + b"\0" * 9, "oversized: 61 bytes, at most 44 . 16"),
        (SEALED + b"\0", "malformed: the header says 8 bytes, 9 have arrived"),
        (SEALED[:-1], "malformed: the header says 8 bytes, 7 have arrived"),
        (SEALED[:-1] + b"?", "malformed: the checksum is wrong"),
        (SEALED[:40] + b"\0\0\0\0" + SEALED[44:], "malformed: the checksum is wrong"),
        (resealed(SEALED, magic=b"\x89PNG"), "not of commjax: begins with"),
        (resealed(SEALED, version=2), "of another version: 2, this side speaks version 1"),
        (resealed(SEALED, kind=1), "of another kind: 1, 'up' was expected"),
        (resealed(SEALED, kind=9), "of another kind: 9"),
        (resealed(SEALED, run=1), "of another run: 0000000000000001, not 000000000000feed"),
        (resealed(SEALED, length=2**32 - 1), "malformed: the header says 4294967295 bytes, 8 have arrived"),
    ],
)
def test_a_malformed_or_oversized_message_or_one_of_another_run_is_refused_with_the_reason(data, reason):
    with pytest.raises(RefusedError, match=reason):
        unseal(data, kind="up", run=0xFEED, limit=16)


def test_ten_thousand_damaged_envelopes_are_all_refused_or_unharmed():
    data = seal(HEADER, bytes(range(30)))
    opened = 0
    for damaged in mutations(data, 3, TRIALS):
        try:
            found = unseal(damaged, kind="up", run=0xFEED, limit=64)
        except RefusedError:
            continue
        opened += 1
        assert damaged == data and found == (HEADER, bytes(range(30)))  # a bit flipped twice, a byte replaced by itself
    assert opened < 100


def test_what_cannot_be_sealed_is_refused(monkeypatch):
    assert envelope.MAX_BYTES == 2**32 - 1  # what its field can hold
    monkeypatch.setattr(envelope, "MAX_BYTES", 3)
    assert seal(HEADER, b"abc")[HEADER_BYTES:] == b"abc"
    with pytest.raises(ValueError, match="payload must have at most 3 bytes, got 4"):
        seal(HEADER, b"abcd")
    with pytest.raises(ValueError, match=r"kind must be one of \('hello', 'down', 'up'\), got 'sideways'"):
        seal(HEADER._replace(kind="sideways"), b"")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_tree_comes_back_from_its_own_number_of_bytes_only(change):
    tree = {"w": np.arange(6.0).reshape(2, 3), "b": np.float32(2), "id": np.int32(7)}
    data = wire.encode_tree(tree)
    assert len(data) == 6 * 8 + 4 + 4
    found = wire.decode_tree(data, tree)
    for name in tree:
        assert found[name].dtype == tree[name].dtype and np.array_equal(found[name], tree[name])
    with pytest.raises(ValueError, match=f"a tree of 56 bytes was expected, got {56 + change}"):
        wire.decode_tree((data + b"0")[: 56 + change], tree)
    assert wire.encode_tree(()) == b"" and wire.decode_tree(b"", ()) == ()


def test_padding_must_be_zero():
    with pytest.raises(ValueError, match=r"3 bits must be filled up with zeros, got \[0, 0, 0, 0, 1\]"):
        wire.from_bytes(b"\x80", 3)
    assert wire.from_bytes(b"\x05", 3).tolist() == [1, 0, 1]


def test_digits_beyond_the_block_or_the_vector_are_refused():
    assert wire.radix_block(3) == (5, 1)
    assert wire.decode_digits(bytes([242]), 5, 3).tolist() == [2] * 5
    with pytest.raises(ValueError, match="5 digits of base 3 must be below 243, got 243"):
        wire.decode_digits(bytes([243]), 5, 3)
    with pytest.raises(ValueError, match=r"2 digits of base 3 must be filled up with zeros, got \[1, 0, 0\]"):
        wire.decode_digits(bytes([9]), 2, 3)
