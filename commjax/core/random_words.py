"""The random numbers of `jax.random`, bit for bit, at a tenth of their price on a CPU.

XLA compiles JAX's threefry to rounds in a loop that pass over memory again and again.  With its rounds written out, all
of it is one pass.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import random_bits_p
from jaxtyping import Array, UInt

from commjax.core.replacing import replacing

_FEWEST = 256
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key: UInt[Array, "2 *n"], high: UInt[Array, "*n"], low: UInt[Array, "*n"]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds, of the counter (high, low)."""
    schedule = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    x, y = high + schedule[0], low + schedule[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def program(keys: Array, *, bit_width: int, shape: tuple[int, ...]) -> Array:
    """The words of an equation `random_bits`: those of `jax.random.bits`."""
    size = math.prod(shape)
    config: Any = jax.config
    threefry = jax.random.key_impl(keys) == "threefry2x32" and config.jax_threefry_partitionable
    # Few words are not worth the longer program.
    if not threefry or size >= 2**32 or keys.size * size < _FEWEST:
        return random_bits_p.bind(keys, bit_width=bit_width, shape=shape)
    # One key for each leading index, one counter for each word.
    words = jnp.moveaxis(jax.random.key_data(keys), -1, 0)
    words = words.reshape(*words.shape, *[1] * len(shape))
    counter = jax.lax.iota(jnp.uint32, size).reshape(*[1] * keys.ndim, *shape)
    counter = jnp.broadcast_to(counter, (*keys.shape, *shape))
    x, y = _threefry(jnp.broadcast_to(words, (2, *counter.shape)), jnp.zeros_like(counter), counter)
    if bit_width == 64:
        return (x.astype(jnp.uint64) << 32) | y.astype(jnp.uint64)
    return (x ^ y).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width])


_fast = replacing({random_bits_p: program})
bits = _fast(jax.random.bits)
normal = _fast(jax.random.normal)
randint = _fast(jax.random.randint)
uniform = _fast(jax.random.uniform)
