"""Scores of weights: the weights of least score are pruned.

All scores have one form.  For a layer W [in, out] with an in-term u_j and an out-term v_k,

    S_jk = join(|W_jk|; u_j, v_k) |X_:j|_2^alpha

A term is a norm of weights, of activations or of given matrices, perhaps over sampled entries.  A join is one of

    relative           |W| / u + |W| / v                RI, RIA, S1
    relative_to_sum    |W| / (u + v)                    S2
    plain              |W| (u + v)                      Wanda, OWanda, SymWanda, symmetric, S3
    harmonic           |W| / (1/u + 1/v)                S4
    root               |W| sqrt(u^2 + v^2)              the squared objective

A missing term is left out, and so is a quotient by a norm that is zero.  `score` builds any of these scores; the
functions after it build those that the thesis names.  A score is a function (W, stats, key) -> S >= 0, computed in
float32 or better. Outside jit it raises a ValueError if the result is not finite.

Thesis: Table 6.1, Sec. 6.3.2 to 6.3.5; S1 to S4 are the joins of Sec. E.3.3.
Differs (docs/errata.md): W6 (the factor |W|), W7 (RIA is no member of the family |W| (u + v)), W10 (axes "in" and
"out", not rows and columns), W12 (sampling), W14 (p = 0, inf).
"""

import math
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from commjax.core.base import Key
from commjax.pruning.joins import Matrix, Norms, harmonic, plain, relative, relative_to_sum, root
from commjax.pruning.statistics import Statistics, wide
from commjax.pruning.terms import (
    Axis,
    Sampled,
    Sampling,
    Term,
    Vector,
    activation_norms,
    activations,
    given,
    norm,
    ratio,
    weights,
)

__all__ = [
    "Axis",
    "Join",
    "Matrix",
    "Sampling",
    "Score",
    "Term",
    "Vector",
    "activations",
    "general",
    "general_diagonal",
    "given",
    "harmonic",
    "magnitude",
    "norm",
    "owanda",
    "plain",
    "ratio",
    "relative",
    "relative_to_sum",
    "ri",
    "ria",
    "root",
    "score",
    "stoch_ria",
    "symmetric",
    "symwanda",
    "wanda",
    "weights",
]


@runtime_checkable
class Join(Protocol):
    """A join of |W| [in, out] with the norms u [in, 1] and v [1, out], or one of them."""

    def __call__(self, w: Matrix, /, *norms: Norms) -> Matrix:
        """Return the joined matrix [in, out]."""
        ...


@runtime_checkable
class Score(Protocol):
    """A score of W [in, out].  `stats` is needed for activations, `key` for sampling."""

    def __call__(self, W: Matrix, stats: Statistics | None = None, key: Key | None = None) -> Matrix:
        """Return the scores S >= 0 [in, out]."""
        ...


def _power(a: Vector, alpha: float) -> Vector:
    """Return a^alpha; square roots and squares are computed exactly as in the released code."""
    exact = {1.0: lambda: a, 0.5: lambda: jnp.sqrt(a), 2.0: lambda: a * a}
    return exact.get(alpha, lambda: a**alpha)()


def score(
    in_term: Term | None = None, out_term: Term | None = None, *, join: Join = relative, alpha: float = 0.0
) -> Score:
    """Build a score from its terms.

        S = join(|W|; u, v) |X_:j|_2^alpha

    X_:j are the values of input j over the calibration tokens.  Without terms S = |W| |X_:j|_2^alpha.  Build a score
    once and call it often: every build is compiled anew.

    >>> score(weights(2.0), weights(2.0), join=plain)(jnp.array([[3.0, -4.0]])).tolist()
    [[24.0, 36.0]]

    Args:
        in_term: Term u of the inputs; None leaves it out.
        out_term: Term v of the outputs; None leaves it out.
        join: Combines |W| with the terms: `relative`, `relative_to_sum`, `plain`, `harmonic` or `root`.  It takes |W|
            [in, out] and the norms u [in, 1], v [1, out], and returns a matrix [in, out].
        alpha: Power of the input norms; 0 leaves them out.

    Returns:
        The score, a function (W, stats=None, key=None) -> S [in, out].  `stats` is needed for activations, `key` for
        sampling.
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha={alpha}; allowed: finite, at least 0")

    terms: dict[Axis, Term | None] = {"in": in_term, "out": out_term}

    @jax.jit
    def matrix(
        W: Matrix, stats: Statistics | None, keys: dict[Axis, Key], drawn: dict[Axis, Float[Array, "_"]]
    ) -> tuple[Matrix, Bool[Array, ""]]:
        w, norms = jnp.abs(W.astype(wide(W.dtype))), []
        for axis, term in terms.items():
            if term is not None:
                u = drawn[axis] if axis in drawn else term(w, stats, keys.get(axis), axis)
                norms.append(u[:, None] if axis == "in" else u[None, :])
        S = join(w, *norms) if norms else w
        S = S * _power(activation_norms(w, stats, "in"), alpha)[:, None] if alpha else S
        return S, jnp.all(jnp.isfinite(S))

    def apply(W: Matrix, stats: Statistics | None = None, key: Key | None = None) -> Matrix:
        if 0 in W.shape:
            raise ValueError(f"W has shape {W.shape}; allowed: at least one input and one output")
        keys: dict[Axis, Key] = {} if key is None else dict(zip(terms, jax.random.split(key)))
        sampled: dict[Axis, Sampled] = {axis: term for axis, term in terms.items() if isinstance(term, Sampled)}
        drawn = {axis: term(W, stats, keys.get(axis), axis) for axis, term in sampled.items()}
        S, finite = matrix(W, stats, keys, drawn)
        _check_finite(finite, W=W, stats=stats)
        return S

    return apply


def _check_finite(finite: Array, **causes: Any) -> None:
    """Raise a ValueError, naming the cause, unless the scores are finite.  Under jit nothing is checked."""
    if isinstance(finite, Tracer) or finite:
        return
    for name, tree in causes.items():
        for leaf in jax.tree.leaves(tree):
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
            if bad:
                raise ValueError(f"{name} has {bad} values that are not finite; allowed: finite numbers")
    raise ValueError("the scores overflow; allowed: W and stats whose scores are finite")


# Scores that the thesis names.


@cache
def magnitude() -> Score:
    """Score |W|, the magnitude of the weight."""
    return score()


@cache
def wanda(alpha: float = 1.0) -> Score:
    """Score of Wanda: |W| |X_:j|_2^alpha, where X are the layer's inputs.

    Thesis: Cor. 6.3.2; Table 6.3 for alpha.

    >>> from commjax.pruning import statistics
    >>> wanda()(jnp.array([[1.0, -2.0]]), statistics.of(jnp.array([[3.0], [4.0]]))).tolist()
    [[5.0, 10.0]]

    Args:
        alpha: Power of the input norms.

    Returns:
        The score, which needs `stats`.
    """
    return score(alpha=alpha)


@cache
def owanda() -> Score:
    """Score of OWanda: |W| |Y_:k|_2, where Y are the layer's outputs.  Thesis: Cor. 6.3.3.

    Within one output the order of the weights is that of `magnitude`.

    Returns:
        The score, which needs `stats` with outputs.
    """
    return score(None, activations(), join=plain)


@cache
def symwanda(join: Join = plain) -> Score:
    """Score of SymWanda: |W| (|X_:j|_2 + |Y_:k|_2), where X and Y are the layer's inputs and outputs.

    Thesis: Lemma 6.3.1, squared Sec. E.2.  The thesis never says what Y is; the layer's outputs are our choice.

    Args:
        join: `plain`, or `root` for the squared objective.

    Returns:
        The score, which needs `stats` with outputs.
    """
    return score(activations(), activations(), join=join)


def general(X: Float[Array, "a i"], Y: Float[Array, "o d"], join: Join = plain) -> Score:
    """Score |W| (|X_:j|_2 + |Y_k:|_2) for given matrices X and Y.  Thesis: Lemma 6.3.1.

    Args:
        X: Matrix [a, in].
        Y: Matrix [out, d].
        join: `plain`, or `root` for the squared objective.

    Returns:
        The score.
    """
    return score(given(norm(X, 2.0, "out")), given(norm(Y, 2.0, "in")), join=join)


@cache
def symmetric(join: Join = plain) -> Score:
    """Score |W| (|W_j:|_2 + |W_:k|_2), with the norms of the weights of input j and of output k.

    Thesis: Cor. 6.3.4.  Differs (docs/errata.md): W6 (the factor |W|).

    Args:
        join: `plain`, or `root` for |W| sqrt(|W_j:|_2^2 + |W_:k|_2^2).

    Returns:
        The score.
    """
    return score(weights(2.0), weights(2.0), join=join)


@cache
def ria(
    alpha: float = 0.5,
    p: float = 1.0,
    axes: tuple[Axis, ...] = ("in", "out"),
    join: Join = relative,
    sampling: Sampling | None = None,
) -> Score:
    """Score of RIA and its variants: (|W| / |W_j:|_p + |W| / |W_:k|_p) |X_:j|_2^alpha, where X are the layer's inputs.

    W_j: are the weights of input j, W_:k those of output k.

    Thesis: Sec. 6.3.3; Sec. 6.3.5 for p, Table 6.3 for one axis only, Sec. E.3.3 for the joins S1 to S4.
    Differs: norms are computed in float32, where the released code uses the dtype of the weights.

    Args:
        alpha: Power of the input norms.
        p: Norm of the weights: 0, or at least 1 (math.inf included).
        axes: Which norms of the weights are used: ("in", "out"), ("in",) or ("out",).
        join: `relative` (S1), `relative_to_sum` (S2), `plain` (S3) or `harmonic` (S4).
        sampling: Draw the entries of the norms; None: all entries.

    Returns:
        The score, which needs `stats` unless alpha is 0, and a key with `sampling`.
    """
    if not axes or not set(axes) <= {"in", "out"}:
        raise ValueError(f"axes={axes}; allowed: ('in',), ('out',), ('in', 'out')")
    term = weights(p, sampling)
    return score(term if "in" in axes else None, term if "out" in axes else None, join=join, alpha=alpha)


@cache
def ri() -> Score:
    """Score of RI (relative importance): |W| / |W_j:|_1 + |W| / |W_:k|_1.  Thesis: Thm 6.3.5.

    >>> ri()(jnp.array([[1.0, -3.0]])).tolist()
    [[1.25, 1.75]]
    """
    return ria(alpha=0.0)


@cache
def stoch_ria(beta: float = 0.1, alpha: float = 1.0, shared: bool = False) -> Score:
    """Score of stochRIA: `ria` with norms of the weights over sampled entries.

    Thesis: Sec. 6.3.5.  Differs (docs/errata.md): W12 (how the entries are sampled).

    Args:
        beta: Share of the entries, 0 < beta <= 1.
        alpha: Power of the input norms.
        shared: Share one draw among all inputs and one among all outputs (`Sampling`).

    Returns:
        The score, which needs `stats` (unless alpha is 0) and a key.
    """
    return ria(alpha=alpha, sampling=Sampling(beta, shared))


def general_diagonal(A: Float[Array, "a i"], B: Float[Array, "o d"]) -> Score:
    """Score |W| (|A_:j|_2 / |W_j:|_1 + |B_k:|_2 / |W_:k|_1) for given A and B.

    Thesis: Lemma 6.3.7.  Differs (docs/errata.md): W6 (the factor |W|).

    Args:
        A: Matrix [a, in].
        B: Matrix [out, d].

    Returns:
        The score.
    """
    u, v = given(norm(A, 2.0, "out")), given(norm(B, 2.0, "in"))
    return score(ratio(weights(), u), ratio(weights(), v))
