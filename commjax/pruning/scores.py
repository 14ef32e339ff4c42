r"""Scores of weights: the smallest are pruned.

One algebra.  With |W| of a layer W [in, out], an in-term u_j, an out-term v_k and the input norms,

    S_jk = join(|W_jk|; u_j, v_k) |X_:j|_2^alpha

where a term is a norm (of weights, activations or given matrices; perhaps of sampled entries) and

    relative           |W| / u + |W| / v                RI, RIA, S1
    relative_to_sum    |W| / (u + v)                    S2
    plain              |W| (u + v)                      Wanda, OWanda, SymWanda, symmetric, S3
    harmonic           |W| / (1/u + 1/v)                S4
    root               |W| sqrt(u^2 + v^2)              the squared objective

A missing term is left out, and so is a quotient by a norm that is zero.  `score` builds any member; the names beneath it are the
thesis's.  A score is a function (W, stats, key) -> S >= 0 in float32 or better; where it may, it looks at the result and refuses NaN.

Thesis: Table (L2434), L2476-L2646, S1-S4 L6047.  Differs: W6 (the factor |W|), W7 (RIA is no member of the family |W| (u + v)),
W10 (axes, not rows and columns), W12 (sampling), W14 (p = 0, inf).
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from commjax.core.base import Key
from commjax.pruning import masks
from commjax.pruning.statistics import Statistics, input_norm, output_norm, wide

Axis = Literal["in", "out"]
Matrix = Float[Array, "i o"]
Norms = Float[Array, "#i #o"]  # of inputs [in, 1] or outputs [1, out]
Vector = Float[Array, "d"]
Term = Callable[[Matrix, Statistics | None, Key | None, Axis], Vector]  # norms along an axis, from |W|
Join = Callable[..., Matrix]  # (|W|, norms that broadcast against it) -> matrix
Score = Callable[..., Matrix]  # (W, stats=None, key=None) -> matrix


class Sampling(NamedTuple):
    """Norms of tau = max(1, floor(beta min(in, out))) entries, drawn without replacement: for every input and output apart,
    or, shared, the same outputs for every input and the same inputs for every output (another estimator, and cheaper)."""

    beta: float
    shared: bool = False


def _divide(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0"""
    return jnp.where(b == 0, 0, a / b)


def relative(w: Matrix, *norms: Norms) -> Matrix:
    """S1: |W| / u + |W| / v"""
    return sum((_divide(w, norm) for norm in norms[1:]), _divide(w, norms[0]))


def relative_to_sum(w: Matrix, *norms: Norms) -> Matrix:
    """S2: |W| / (u + v)"""
    return _divide(w, sum(norms[1:], norms[0]))


def plain(w: Matrix, *norms: Norms) -> Matrix:
    """S3: |W| (u + v)"""
    return w * sum(norms[1:], norms[0])


def harmonic(w: Matrix, *norms: Norms) -> Matrix:
    """S4: |W| / (1/u + 1/v), and 0 where a norm is 0"""
    return w / sum((1 / norm for norm in norms[1:]), 1 / norms[0])


def root(w: Matrix, *norms: Norms) -> Matrix:
    """|W| sqrt(u^2 + v^2)"""
    return w * jnp.sqrt(sum((norm * norm for norm in norms[1:]), norms[0] * norms[0]))


def norm(w: Matrix, p: float, axis: Axis, where: Array | None = None) -> Vector:
    """|W_j:|_p (axis "in", one number an input) or |W_:k|_p (axis "out"); p = 0 counts nonzeros; over the entries `where`.

    >>> norm(jnp.array([[3.0, 4.0], [0.0, 2.0]]), 2.0, "in").tolist()
    [5.0, 2.0]
    """
    along = 1 if axis == "in" else 0
    w = jnp.abs(w) if where is None else jnp.where(where, jnp.abs(w), 0)
    if p == 0:
        return jnp.sum(w != 0, axis=along).astype(w.dtype)
    if p == 1:
        return jnp.sum(w, axis=along)
    if p == 2:
        return jnp.sqrt(jnp.sum(w * w, axis=along))
    largest = jnp.max(w, axis=along, keepdims=True)
    if math.isinf(p):
        return jnp.squeeze(largest, along)
    scaled = _divide(w, largest)  # or small weights would underflow
    return jnp.squeeze(largest, along) * jnp.sum(scaled**p, axis=along) ** (1 / p)


def activations() -> Term:
    """|X_:j|_2 on the in side, |Y_:k|_2 on the out side, over sqrt(samples)."""
    return lambda w, stats, key, axis: _of_activations(w, stats, axis)


def given(norms: Vector) -> Term:
    """The caller's own norms."""
    return lambda w, stats, key, axis: _of_length(norms, w, axis, "norms")


def weights(p: float = 1.0, sampling: Sampling | None = None) -> Term:
    """|W_j:|_p on the in side, |W_:k|_p on the out side."""
    if not (p == 0 or p >= 1):
        raise ValueError(f"p={p}; allowed: 0, or at least 1 (math.inf included)")
    if sampling is not None and not 0 < sampling.beta <= 1:
        raise ValueError(f"beta={sampling.beta}; allowed: 0 < beta <= 1")

    if sampling is not None:
        return _Sampled(p, sampling)
    return lambda w, stats, key, axis: norm(w, p, axis)


def ratio(a: Term, b: Term) -> Term:
    """a / b"""
    return lambda *arguments: _divide(a(*arguments), b(*arguments))


class _Sampled(NamedTuple):
    """A term that `score` computes apart: one program for every beta, because its draws take long to compile."""

    p: float
    sampling: Sampling

    def __call__(self, w: Matrix, stats: Statistics | None, key: Key | None, axis: Axis) -> Vector:
        if key is None:
            raise ValueError("key=None; allowed: a key, because this score samples")
        tau = max(1, math.floor(self.sampling.beta * min(w.shape) + 1e-9))
        return _sampled(w, key, tau, self.p, axis, self.sampling.shared)


@partial(jax.jit, static_argnames=("p", "axis", "shared"))
def _sampled(w, key, tau, p, axis, shared):
    """The entries of the tau least of random words (ties, of probability about tau / 2^31, go to the first)."""
    w = w.astype(wide(w.dtype))
    rows = w if axis == "in" else w.T
    words = jax.random.bits(key, (1 if shared else len(rows), rows.shape[1]), jnp.uint32) >> 1
    return norm(rows, p, "in", masks.least(words.astype(jnp.int32), tau, "input"))


def _of_length(vector, w, axis, name):
    size = w.shape[0 if axis == "in" else 1]
    if vector.shape != (size,):
        raise ValueError(f"{name} has shape {vector.shape}; allowed: ({size},) on the {axis} side of W {w.shape}")
    return vector.astype(w.dtype)


def _of_activations(w, stats, axis):
    if stats is None:
        raise ValueError("stats=None; allowed: Statistics, because this score needs activations")
    return _of_length((input_norm if axis == "in" else output_norm)(stats), w, axis, "stats")


def _power(a, alpha):
    """a^alpha, square roots and squares exactly as the released code has them."""
    exact = {1.0: lambda: a, 0.5: lambda: jnp.sqrt(a), 2.0: lambda: a * a}
    return exact.get(alpha, lambda: a**alpha)()


def score(
    in_term: Term | None = None, out_term: Term | None = None, *, join: Join = relative, alpha: float = 0.0
) -> Score:
    """S = join(|W|; u, v) |X_:j|_2^alpha; without terms |W| |X_:j|_2^alpha.

    Build it once and call it often: each build is compiled anew.

    >>> score(weights(2.0), weights(2.0), join=plain)(jnp.array([[3.0, -4.0]])).tolist()
    [[24.0, 36.0]]
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha={alpha}; allowed: finite, at least 0")

    terms: dict[Axis, Term | None] = {"in": in_term, "out": out_term}

    @jax.jit
    def matrix(W, stats, keys, drawn):
        w, norms = jnp.abs(W.astype(wide(W.dtype))), []
        for axis, term in terms.items():
            if term is not None:
                u = drawn[axis] if axis in drawn else term(w, stats, keys.get(axis), axis)
                norms.append(u[:, None] if axis == "in" else u[None, :])
        S = join(w, *norms) if norms else w
        S = S * _power(_of_activations(w, stats, "in"), alpha)[:, None] if alpha else S
        return S, jnp.all(jnp.isfinite(S))

    def apply(W: Matrix, stats: Statistics | None = None, key: Key | None = None) -> Matrix:
        if 0 in W.shape:
            raise ValueError(f"W has shape {W.shape}; allowed: at least one input and one output")
        keys: dict[Axis, Key] = {} if key is None else dict(zip(terms, jax.random.split(key)))
        sampled: dict[Axis, _Sampled] = {axis: term for axis, term in terms.items() if isinstance(term, _Sampled)}
        drawn = {axis: term(W, stats, keys.get(axis), axis) for axis, term in sampled.items()}
        S, finite = matrix(W, stats, keys, drawn)
        _check_finite(finite, W=W, stats=stats)
        return S

    return apply


def _check_finite(finite: Array, **causes: Any) -> None:
    """Only outside jit, where there are numbers to look at."""
    if isinstance(finite, Tracer) or finite:
        return
    for name, tree in causes.items():
        for leaf in jax.tree.leaves(tree):
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
            if bad:
                raise ValueError(f"{name} has {bad} values that are not finite; allowed: finite numbers")
    raise ValueError("the scores overflow; allowed: W and stats whose scores are finite")


# The names of the thesis.


@cache
def magnitude() -> Score:
    """|W|"""
    return score()


@cache
def wanda(alpha: float = 1.0) -> Score:
    """|W| |X_:j|_2^alpha.  Thesis: Cor. (L2503); alpha L2741.

    >>> from commjax.pruning import statistics
    >>> wanda()(jnp.array([[1.0, -2.0]]), statistics.of(jnp.array([[3.0], [4.0]]))).tolist()
    [[5.0, 10.0]]
    """
    return score(alpha=alpha)


@cache
def owanda() -> Score:
    """|W| |Y_:k|_2 with the layer's outputs as Y: magnitude's order within an output.  Thesis: Cor. (L2509)."""
    return score(None, activations(), join=plain)


@cache
def symwanda(join: Join = plain) -> Score:
    """|W| (|X_:j|_2 + |Y_:k|_2) with the layer's inputs and outputs; `join=root` for the squared objective.

    Thesis: Lemma 1 (L2490), squared L5930.  Y as the layer's outputs is our choice: the thesis never says what it is.
    """
    return score(activations(), activations(), join=join)


def general(X: Float[Array, "a i"], Y: Float[Array, "o d"], join: Join = plain) -> Score:
    """|W| (|X_:j|_2 + |Y_k:|_2) for any X [a, in] and Y [out, d].  Thesis: Lemma 1 (L2490)."""
    return score(given(norm(X, 2.0, "out")), given(norm(Y, 2.0, "in")), join=join)


@cache
def symmetric(join: Join = plain) -> Score:
    """|W| (|W_j:|_2 + |W_:k|_2); `join=root` for |W| sqrt(|W_j:|_2^2 + |W_:k|_2^2).  Thesis: Cor. (L2514); Differs: W6."""
    return score(weights(2.0), weights(2.0), join=join)


@cache
def ria(
    alpha: float = 0.5,
    p: float = 1.0,
    axes: tuple[Axis, ...] = ("in", "out"),
    join: Join = relative,
    sampling: Sampling | None = None,
) -> Score:
    """(|W| / |W_j:|_p + |W| / |W_:k|_p) |X_:j|_2^alpha: RIA, its l_p forms, one side only, S2-S4 by `join`, sampled.

    Thesis: L2539, l_p L2602, one side only L2739, S1-S4 L6047.  Differs: float32 sums, where the released code has the weights' dtype.
    """
    if not axes or not set(axes) <= {"in", "out"}:
        raise ValueError(f"axes={axes}; allowed: ('in',), ('out',), ('in', 'out')")
    term = weights(p, sampling)
    return score(term if "in" in axes else None, term if "out" in axes else None, join=join, alpha=alpha)


@cache
def ri() -> Score:
    """|W| / |W_j:|_1 + |W| / |W_:k|_1.  Thesis: Thm (L2519).

    >>> ri()(jnp.array([[1.0, -3.0]])).tolist()
    [[1.25, 1.75]]
    """
    return ria(alpha=0.0)


@cache
def stoch_ria(beta: float = 0.1, alpha: float = 1.0, shared: bool = False) -> Score:
    """RIA with the norms of sampled entries; its score wants a key.  Thesis: L2618; Differs: W12."""
    return ria(alpha=alpha, sampling=Sampling(beta, shared))


def general_diagonal(A: Float[Array, "a i"], B: Float[Array, "o d"]) -> Score:
    """|W| (|A_:j|_2 / |W_j:|_1 + |B_k:|_2 / |W_:k|_1) for any A [a, in] and B [out, d].  Thesis: Lemma (L2583); Differs: W6."""
    u, v = given(norm(A, 2.0, "out")), given(norm(B, 2.0, "in"))
    return score(ratio(weights(), u), ratio(weights(), v))
