r"""Training-free fine-tuning: swap pruned weights for kept ones, so that an output's expected error comes near zero.

For every output, with eps = x W - x W~ and contributions M_j = W_j E[x_j] of the dense weights, E eps is the sum of M over the pruned
inputs.  One swap grows the input g and prunes the input p, E eps <- E eps + M_p - M_g:

    g = argmax_{pruned, sign(E eps) G_g > 0}  |G_g|          G = the grow score, signed
    p = argmin_{kept,   sign(E eps) M_p < 0}  P_p            P = the prune score

`dsnot` is DSnoT as released, `r2_dsnot` is R^2-DSnoT: the same swaps with other scores (`commjax.pruning.swaps`).

Thesis: L2650-L2693, settings L6022.  Differs: W2 (statistics of the input, not of the output), W3 (dense weights over the pruned
set).  Where the released code runs out of candidates it reads beyond its lists and loses count; here an output without one is done.
"""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from commjax.pruning import statistics
from commjax.pruning.masks import check_pattern
from commjax.pruning.scores import norm
from commjax.pruning.statistics import Statistics
from commjax.pruning.swaps import in_blocks, swaps

Matrix = Float[Array, "i o"]
Regularizer = Literal["out", "in", "toggled"]


def dsnot(
    W: Matrix,
    mask: Bool[Array, "_ _"],
    stats: Statistics,
    *,
    pattern: tuple[int, int] | None = None,
    prune: Float[Array, "_ _"] | None = None,
    cycles: int = 50,
    threshold: float = 0.1,
    power: float = 1.0,
    same_sign: bool | None = None,
) -> tuple[Matrix, Bool[Array, "i o"]]:
    """DSnoT: G = M / Var^power, P = Wanda's score, whatever made the mask.  Returns (W~, mask).

    `pattern=(n, m)`: the mask keeps n of m inputs, and p is the least `prune` of g's group, whatever its sign; the released code
    takes the scores that made the mask, so give those.  `threshold`: an output is done when |E eps| times the tokens of a sample
    is no larger.  `same_sign`: it is also done when the next swap would turn the sign of E eps; None is as released (off, but on with
    a pattern).  A channel with neither mean nor variance is no candidate; one with a mean only grows first.

    Thesis: L2650.  Differs: W2, W3.
    """
    same_sign = _checked(W, mask, stats, pattern, cycles, threshold, power, same_sign)
    if prune is not None and prune.shape != W.shape:
        raise ValueError(f"prune has shape {prune.shape}; allowed: that of W, {W.shape}")
    return _dsnot(W, mask, stats, prune, threshold, power, cycles, pattern and pattern[1], same_sign)


@partial(jax.jit, static_argnames=("power", "m", "same_sign"))
def _dsnot(W, mask, stats, prune, threshold, power, cycles, m, same_sign):
    sums, _, variance, norms = _columns(W, stats)
    divisor, threshold, cycles = variance**power, jnp.asarray(threshold, sums.dtype), jnp.asarray(cycles, jnp.int32)

    def block(W, mask, *given):  # the scores too, so that they are never written to memory as a whole
        w = W.astype(sums.dtype)
        grow = _quotient(w * sums, divisor)
        prune = given[0].astype(w.dtype) if given else jnp.abs(w) * norms
        return swaps(mask, w, sums[:, 0], grow, prune, threshold, cycles, m=m, same_sign=same_sign)

    mask = in_blocks(block, W, mask, *(() if prune is None else (prune,)))
    return jnp.where(mask, W, 0), mask


def r2_dsnot(
    W: Matrix,
    mask: Bool[Array, "_ _"],
    stats: Statistics,
    *,
    relative_grow: bool = True,
    relative_prune: bool = False,
    alpha: float = 0.5,
    gamma_grow: float = 0.0,
    gamma_prune: float = 0.0,
    p: float = 2.0,
    regularizer: Regularizer = "out",
    literal: bool = False,
    pattern: tuple[int, int] | None = None,
    cycles: int = 50,
    threshold: float = 0.1,
    power: float = 1.0,
    same_sign: bool | None = None,
) -> tuple[Matrix, Bool[Array, "i o"]]:
    r"""R^2-DSnoT: DSnoT with relative importance D and a regulariser R, both frozen at the given mask.  Returns (W~, mask).

        |G| = |W D E[x]| / Var^power + gamma_grow R         G has the sign of W E[x]
         P  = |W| D |X_:j|_2^alpha + gamma_prune R          D_jk = 1/|W~_:k|_1 + 1/|W~_j:|_1, where relative_... says so, else 1

    `regularizer`: "out" is |W~_:k|_p as printed, constant for an output, so that gamma changes nothing; "in" is |W~_j:|_p, which fits
    the printed ablation; "toggled" is |W~_:k|_p after that one change.  `literal=True` is the printed grow rule D E[x] / Var, without W.
    The ablation's best: relative_grow on RIA's mask; relative_prune alone, gamma_prune=1e-3, on Wanda's.

    Thesis: L2675-L2693, ablation L6097.  Differs: W4 (W kept in the grow rule; zero norms are left out of D), W5, W15d (bases swapped).
    """
    same_sign = _checked(W, mask, stats, pattern, cycles, threshold, power, same_sign)
    for name, value in (("alpha", alpha), ("gamma_grow", gamma_grow), ("gamma_prune", gamma_prune)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}; allowed: finite, at least 0")
    if not p >= 1:
        raise ValueError(f"p={p}; allowed: at least 1 (math.inf included)")
    if regularizer not in ("out", "in", "toggled"):
        raise ValueError(f"regularizer={regularizer!r}; allowed: 'out', 'in', 'toggled'")
    rule = (relative_grow, relative_prune, alpha, p, regularizer, literal, power)
    sums, grow, prune = _r2_scores(W, mask, stats, gamma_grow, gamma_prune, rule)
    return _swapped(W, mask, sums, grow, prune, threshold, cycles, pattern and pattern[1], same_sign)


@partial(jax.jit, static_argnames="rule")
def _r2_scores(W, mask, stats, gamma_grow, gamma_prune, rule):
    """sum_t x, G, P; apart from the swaps, so that those are compiled once for all rules"""
    relative_grow, relative_prune, alpha, p, regularizer, literal, power = rule
    sums, mean, variance, norms = _columns(W, stats)
    w = W.astype(sums.dtype)
    kept = jnp.where(mask, w, 0)
    D = _inverse(norm(kept, 1.0, "out"))[None, :] + _inverse(norm(kept, 1.0, "in"))[:, None]
    R = _regularizer(w, mask, kept, p, regularizer)
    grow = _quotient(mean if literal else w * mean, variance**power) * (D if relative_grow else jnp.ones_like(w))
    grow = grow + jnp.sign(grow) * jnp.asarray(gamma_grow, w.dtype) * R
    prune = jnp.abs(w) * norms**alpha * (D if relative_prune else jnp.ones_like(w))
    return sums, grow, prune + jnp.asarray(gamma_prune, w.dtype) * R


def _regularizer(w, mask, kept, p, regularizer):
    """R [in, out]"""
    out, size = norm(kept, p, "out")[None, :], jnp.abs(w)
    if regularizer == "out":
        return jnp.broadcast_to(out, w.shape)
    if regularizer == "in":
        return jnp.broadcast_to(norm(kept, p, "in")[:, None], w.shape)
    if math.isinf(p):
        largest = mask & (size == out)
        alone = jnp.sum(largest, axis=0, keepdims=True) == 1
        second = jnp.max(jnp.where(mask & ~largest, size, 0), axis=0, keepdims=True)
        return jnp.where(mask, jnp.where(largest & alone, second, out), jnp.maximum(out, size))
    scale = jnp.maximum(out, jnp.max(size, axis=0, keepdims=True))  # or small weights would underflow
    scale = jnp.where(scale == 0, 1, scale)
    share = jnp.where(mask, -1, 1) * (size / scale) ** p
    return scale * jnp.maximum((out / scale) ** p + share, 0) ** (1 / p)


def _inverse(a):
    """1 / a, and 0 where a is 0"""
    return jnp.where(a == 0, 0, 1 / a)


def _quotient(a, b):
    """a / b, and 0 where a is 0: a dead channel would be 0 / 0"""
    return jnp.where(a == 0, 0, a / b)


def _columns(W, stats):
    """sum_t x, E x, Var x and |X_:j|_2 as columns [in, 1], in W's dtype but at least float32."""
    vectors = (statistics.input_sum, statistics.mean, statistics.variance, statistics.input_norm)
    return [f(stats).astype(statistics.wide(W.dtype))[:, None] for f in vectors]


@partial(jax.jit, static_argnames=("m", "same_sign"))
def _swapped(W, mask, sums, grow, prune, threshold, cycles, m, same_sign):
    threshold, cycles = jnp.asarray(threshold, grow.dtype), jnp.asarray(cycles, jnp.int32)

    def block(W, mask, grow, prune):
        w = W.astype(grow.dtype)
        return swaps(mask, w, sums[:, 0], grow, prune, threshold, cycles, m=m, same_sign=same_sign)

    mask = in_blocks(block, W, mask, grow, prune)
    return jnp.where(mask, W, 0), mask


def _checked(W, mask, stats, pattern, cycles, threshold, power, same_sign) -> bool:
    """same_sign, after everything else was looked at"""
    if mask.shape != W.shape:
        raise ValueError(f"mask has shape {mask.shape}; allowed: that of W, {W.shape}")
    if stats.x.hi.shape != W.shape[:1]:
        raise ValueError(f"stats has {stats.x.hi.shape[-1]} inputs; allowed: the {W.shape[0]} of W")
    if pattern is not None:
        check_pattern(W.shape[0], *pattern)
    if not 1 <= cycles <= 2**30:
        raise ValueError(f"cycles={cycles}; allowed: 1 to {2**30}")
    for name, value in (("threshold", threshold), ("power", power)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}; allowed: finite, at least 0")
    return pattern is not None if same_sign is None else same_sign
