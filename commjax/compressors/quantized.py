"""Compressors that send every coordinate in fewer bits: natural compression, random dithering, scaled sign."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from commjax.compressors import exact_laws, wire
from commjax.compressors.exact_laws import Law
from commjax.compressors.vectors import check_count, from_value, independent, on_vectors, value_bits
from commjax.core import random_words, tree
from commjax.core.base import ClientId, Compressor, Constants, Key

_UINT = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def natural() -> Compressor:
    """Round each entry up or down to a power of two, at random and without bias (Horvath et al., 2022).

    Only the sign and the exponent of each entry are sent.
    Holds if: no entry is subnormal or in the last binade of its dtype (it may then round to 0 or to infinity).

    Returns:
        An unbiased compressor, in C(0, 1/8).  The bound is attained where |x_j| is 4/3 of a power of two.

    >>> natural().compress(jax.random.key(0), jnp.array([0.0, 1.0, -4.0])).value.tolist()
    [0.0, 1.0, -4.0]
    """

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        # The mantissa is the probability of rounding up, so one integer comparison is exact.
        mantissa = jnp.finfo(x.dtype).nmant
        bits = jax.lax.bitcast_convert_type(x, _UINT[x.dtype.itemsize])
        low = jnp.asarray((1 << mantissa) - 1, bits.dtype)
        up = (random_words.bits(jax.random.fold_in(key, id), x.shape, bits.dtype) & low) < (bits & low)
        up &= jnp.isfinite(x)  # a NaN becomes infinite; rounded up, its bits could become those of zero
        rounded = (bits & ~low) + (up.astype(bits.dtype) << mantissa)
        return jax.lax.bitcast_convert_type(rounded, x.dtype)

    def width(dtype: Any) -> int:
        return value_bits(dtype) - jnp.finfo(dtype).nmant

    def pack(key: Key, value: np.ndarray, id: ClientId, n: int) -> bytes:
        shift = np.uint64(jnp.finfo(value.dtype).nmant)
        exponents = value.view(f"u{value.dtype.itemsize}").astype(np.uint64) >> shift
        return wire.to_bytes(wire.pack_integers(exponents, width(value.dtype)))

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        exponents = wire.unpack_integers(wire.from_bytes(data, d * width(dtype)), width(dtype))
        bits = exponents << np.uint64(jnp.finfo(dtype).nmant)
        return bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)

    def law(x: np.ndarray) -> Law:
        low = np.sign(x) * 2.0 ** np.floor(np.log2(np.where(x == 0, 1, np.abs(x))))
        return exact_laws.coordinatewise(low, 2 * low, np.where(x == 0, 0, x / np.where(x == 0, 1, low) - 1))

    return on_vectors(
        "natural",
        compress=compress,
        bits=lambda key, d, dtype, id, n: wire.whole_bytes(d * width(dtype)),
        pack=from_value(compress, pack),
        unpack=unpack,
        constants=lambda d, n: independent(n, 0.0, 1 / 8),
        kept=lambda d, n: d,
        outcomes=exact_laws.independent(law),
    )


def dithering_omega(d: int, levels: int, norm: float = 2.0) -> float:
    """Return the omega of `dithering`; for p >= 2 it is at most QSGD's min(d/s^2, sqrt(d)/s).

    With y = |x| / |x|_p the relative variance is sum phi(y_i) / sum y_i^2, where phi = f(1-f)/s^2 and f = frac(s y).
    As a function of z = y^2, phi has the smallest concave bound

        env(z) = sqrt(z)/s - z  if z <= 1/(4 s^2),  else 1/(4 s^2)

    By Jensen's inequality the supremum is at most d env(c^2/d) / c^2 with c = min |y|_2.  On the first branch it is
    attained where all |x_j| are equal.

    Args:
        d: dimension.
        levels: s, the number of levels.
        norm: p, at least 1; `math.inf` is allowed.

    Returns:
        omega.
    """
    if levels == 1 and math.isinf(norm):
        return (math.sqrt(d) - 1) / 2  # one entry at the maximum, the others at 1/(sqrt(d)+1) of it
    c2 = 1.0 if norm >= 2 else d ** (1 - 2 / norm)
    z = c2 / d
    first = z <= 1 / (4 * levels**2) or levels == 1
    envelope = math.sqrt(z) / levels - z if first else 1 / (4 * levels**2)
    return max(0.0, d * envelope / c2)


def _wide(dtype: Any) -> np.dtype:
    """Return the dtype of the norm and of the arithmetic: float32 for half precision, else the given dtype."""
    return np.dtype(np.float32) if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)


def _norm(x: Array, p: float) -> Array:
    """Return |x|_p; for p in {1, 2, inf} every program computes the same bits."""
    if math.isinf(p):
        return jnp.max(jnp.abs(x))
    if p == 1:
        return tree.ordered_sum(jnp.abs(x))
    if p == 2:
        return jnp.sqrt(tree.ordered_sum(x * x))
    return tree.ordered_sum(jnp.abs(x) ** p) ** (1 / p)


def _rounded_at_random(value: Array, uniform: Array, dtype: Any) -> Array:
    """Round float32 values to one of the two nearest numbers of a half-precision dtype, without bias.

    quantum  the distance between the two neighbours of |value|: a power of two, so only the draw is inexact
    up       true with probability frac(|value| / quantum)
    """
    format = jnp.finfo(dtype)
    exponent = jax.lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(0x7F800000)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32) * jnp.float32(2.0**-format.nmant)
    quantum = jnp.maximum(quantum, jnp.float32(max(float(format.smallest_subnormal), 2.0**-126)))
    ratio = jnp.abs(value) / quantum
    low = jnp.floor(ratio)
    up = (uniform < ratio - low).astype(jnp.float32)
    return (jnp.sign(value) * (low + up) * quantum).astype(dtype)


@partial(jax.jit, static_argnames=("dtype", "levels"))
def _dequantized(scale: Array, level: Array, uniform: Array | None, dtype: np.dtype, levels: int) -> Array:
    """Return level / levels times scale, rounded to `dtype` at random if `uniform` is given."""
    # Only multiplications, scalars first, because XLA may compile x / c as x (1/c), and a (b c) as (a c) b.
    step = tree.once(scale * jnp.asarray(1 / levels, scale.dtype))
    value = tree.once(level.astype(scale.dtype) * step)
    return value if uniform is None else _rounded_at_random(value, uniform, dtype)


def _randomness(key: Key, d: int, dtype: Any, id: ClientId) -> tuple[Key, Array | None]:
    """Return the key of the levels, and the uniform numbers of the second rounding (None without one)."""
    key = jax.random.fold_in(key, id)
    if _wide(dtype) == np.dtype(dtype):
        return key, None
    key_level, key_value = jax.random.split(key)
    return key_level, random_words.uniform(key_value, (d,), jnp.float32)


def dithering(levels: int, norm: float = 2.0) -> Compressor:
    """Random dithering with s levels in the p-norm (QSGD at p = 2, TernGrad at s = 1 and p = inf).

        C(x)_j = |x|_p sign(x_j) l_j / s,   l_j = s |x_j| / |x|_p rounded up or down at random without bias

    One norm and d digits of base 2s + 1 are sent.

    Precision: half-precision x is handled in float32, and the norm is sent in float32 (32 bits).  C(x)_j is then
    rounded to one of its two neighbours in x's dtype, at random and without bias, with numbers that the receiver draws
    from the shared key.  Hence eta = 0 holds up to float32's rounding (2^-22) in every dtype.  In half precision omega
    becomes omega + u^2 (1 + omega), with u = 2^-8 in bfloat16 and 2^-11 in float16.

    Holds if: |x|_p is a finite number of x's dtype.  Sender and simulation compute the same bits for p in {1, 2, inf};
    for another p two programs may round a power differently.

    Args:
        levels: s, the number of levels, 1 <= s < 2^30.
        norm: p, at least 1; `math.inf` is allowed.

    Returns:
        An unbiased compressor, in C(0, omega) with omega from `dithering_omega`.  This omega is exact for s <=
        sqrt(d)/2 and p <= 2, and for s = 1 and p = inf.

    >>> round(dithering(1).constants(100).omega, 6)
    9.0
    """
    check_count("dithering", "levels", levels)
    if levels >= 1 << 30:
        raise ValueError(f"dithering: levels must be below 2^30 (digits are 32-bit integers), got {levels}")
    if not norm >= 1:
        raise ValueError(f"dithering: norm must be at least 1 (or inf), got {norm}")

    def quantize(key_level: Key, x: Array) -> tuple[Array, Array]:
        wide = x.astype(_wide(x.dtype))
        scale = _norm(wide, norm)
        relative = tree.once(jnp.abs(wide) / jnp.where(scale > 0, scale, jnp.ones((), wide.dtype)) * levels)
        low = jnp.floor(relative)
        up = random_words.uniform(key_level, x.shape, wide.dtype) < relative - low
        # Rounding may put |x_j| / |x|_p an ulp above 1.  The minimum is taken over integers, because s need not be
        # representable in this dtype.
        level = jnp.minimum((low + up.astype(wide.dtype)).astype(jnp.int32), levels)
        return scale, jnp.sign(x).astype(jnp.int32) * level

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        key_level, uniform = _randomness(key, x.size, x.dtype, id)
        return _dequantized(*quantize(key_level, x), uniform, np.dtype(x.dtype), levels)

    def pack(key: Key, x: Array, id: ClientId, n: int) -> bytes:
        scale, level = quantize(_randomness(key, x.size, x.dtype, id)[0], x)
        return wire.encode_values(np.asarray(scale)) + wire.encode_digits(np.asarray(level) + levels, 2 * levels + 1)

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        size = _wide(dtype).itemsize
        scale = wire.decode_values(data[:size], 1, _wide(dtype))[0]
        digits = wire.decode_digits(data[size:], d, 2 * levels + 1)
        return _dequantized(scale, digits - levels, _randomness(key, d, dtype, id)[1], np.dtype(dtype), levels)

    def law(x: np.ndarray) -> Law:
        scale = np.linalg.norm(x, ord=norm)
        relative = np.minimum(np.abs(x) / (scale or 1.0) * levels, levels)
        low = np.floor(relative)
        step = np.sign(x) * scale / levels
        return exact_laws.coordinatewise(step * low, step * (low + 1), relative - low)

    return on_vectors(
        f"dithering({levels},p={norm:g})",
        compress=compress,
        bits=lambda key, d, dtype, id, n: value_bits(_wide(dtype)) + wire.radix_bits(d, 2 * levels + 1),
        pack=pack,
        unpack=unpack,
        constants=lambda d, n: independent(n, 0.0, dithering_omega(d, levels, norm)),
        kept=lambda d, n: d,
        outcomes=exact_laws.independent(law),
    )


def ternary(norm: float = math.inf) -> Compressor:
    """Dithering with one level: each entry becomes -1, 0 or 1 times the norm (TernGrad at p = inf).

    Args:
        norm: p, at least 1; `math.inf` is allowed.

    Returns:
        `dithering(1, norm)`.
    """
    return dithering(1, norm)._replace(name=f"ternary(p={norm:g})")


def scaled_sign() -> Compressor:
    """Send the sign of each entry and one common magnitude.

        C(x) = (|x|_1 / d) sign(x),   sign(0) = 1

    One number and d bits are sent.  |C(x) - x|^2 = |x|^2 - |x|_1^2 / d.

    Returns:
        A compressor in C(sqrt(1 - 1/d), 0).  The bound is attained where x has one nonzero entry.

    >>> scaled_sign().compress(jax.random.key(0), jnp.array([3.0, -1.0])).value.tolist()
    [2.0, -2.0]
    """

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        total = tree.ordered_sum(jnp.abs(x).astype(_wide(x.dtype)))
        scale = tree.once((total * jnp.asarray(1 / x.size, total.dtype)).astype(x.dtype))
        return jnp.where(x < 0, -scale, scale)

    def pack(key: Key, value: np.ndarray, id: ClientId, n: int) -> bytes:
        return wire.encode_values(np.abs(value[:1])) + wire.to_bytes(np.signbit(value).astype(np.uint8))

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        size = np.dtype(dtype).itemsize
        scale = wire.decode_values(data[:size], 1, dtype)[0]
        return np.where(wire.from_bytes(data[size:], d) == 1, -scale, scale)

    return on_vectors(
        "scaled sign",
        compress=compress,
        bits=lambda key, d, dtype, id, n: value_bits(dtype) + wire.whole_bytes(d),
        pack=from_value(compress, pack),
        unpack=unpack,
        constants=lambda d, n: Constants(math.sqrt(1 - 1 / d), 0.0, 0.0),
        kept=lambda d, n: d,
        outcomes=exact_laws.certain(lambda x: np.abs(x).mean() * np.where(x < 0, -1.0, 1.0)),
    )
