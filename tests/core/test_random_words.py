"""Random numbers that are those of `jax.random`, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from commjax.core import random_words

KEYS = {
    "typed": lambda: jax.random.key(3),
    "folded": lambda: jax.random.fold_in(jax.random.key(2**40 + 1), 7),
    "rbg": lambda: jax.random.key(5, impl="rbg"),
}


def same(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("shape", [(), (7,), (300,), (3, 5, 40), (1, 1000), (0,), (70_001,)], ids=str)
def test_words_of_every_width_and_numbers_are_those_of_jax(kind, shape):
    key = KEYS[kind]()
    for dtype in (jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64):
        same(random_words.bits(key, shape, dtype), jax.random.bits(key, shape, dtype))
    raw = jax.random.key_data(key) if kind == "typed" else key  # a key of the older kind
    for dtype in (jnp.float64, jnp.float32, jnp.bfloat16):
        for name in ("uniform", "normal"):
            same(getattr(random_words, name)(raw, shape, dtype), getattr(jax.random, name)(key, shape, dtype))


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 2000))
def test_keys_under_vmap_jit_and_scan_draw_the_words_of_jax(seed, n, d):
    keys = jax.random.split(jax.random.key(seed), n)

    def drawn(bits):
        def one(key):
            return bits(key, (d,), jnp.uint32)

        again = jax.lax.scan(lambda total, key: (total ^ one(key), None), jnp.zeros(d, jnp.uint32), keys)[0]
        return jax.vmap(one)(keys), jax.lax.map(one, keys), again

    for found, wanted in zip(jax.jit(lambda: drawn(random_words.bits))(), drawn(jax.random.bits)):
        same(found, wanted)


def test_they_are_the_same_on_devices_and_have_no_derivative():
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 4)

    def client(keys):
        return random_words.normal(keys[0], (500,), jnp.float32)[None]

    found = jax.jit(jax.shard_map(client, mesh=mesh, in_specs=P("clients"), out_specs=P("clients")))(keys)
    wanted = jax.vmap(lambda key: jax.random.normal(key, (500,), jnp.float32))(keys)
    same(found, wanted)
    gradient = jax.grad(lambda x: jnp.sum(x * random_words.normal(keys[0], (500,), jnp.float32)))(
        jnp.ones(500, "float32")
    )
    same(gradient, wanted[0])


def test_the_older_way_to_count_words_is_followed():
    with jax.threefry_partitionable(False):
        wanted = jax.random.bits(jax.random.key(1), (1000,), jnp.uint32)
        same(random_words.bits(jax.random.key(1), (1000,), jnp.uint32), wanted)
    assert (wanted != random_words.bits(jax.random.key(1), (1000,), jnp.uint32)).any()


def test_on_other_platforms_the_program_is_that_of_jax():
    texts = [
        jax.jit(lambda key, bits=bits: bits(key, (1000,), jnp.uint32))
        .trace(jax.random.key(0))
        .lower(lowering_platforms=("tpu",))
        .as_text()
        for bits in (random_words.bits, jax.random.bits)
    ]
    assert texts[0].count("stablehlo.while") == texts[1].count("stablehlo.while")
