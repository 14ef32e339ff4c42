"""Terms of scores: norms of weights, of activations or of given matrices (`commjax.pruning.scores`)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from commjax.core import random_words
from commjax.core.base import Key
from commjax.pruning import masks
from commjax.pruning.joins import Matrix, divide
from commjax.pruning.statistics import Statistics, input_norm, output_norm, wide

Axis = Literal["in", "out"]
Vector = Float[Array, "d"]
Term = Callable[[Matrix, Statistics | None, Key | None, Axis], Vector]  # (|W|, stats, key, axis) -> norms


class Sampling(NamedTuple):
    """Sampled norms: tau = max(1, floor(beta min(in, out))) entries, drawn without replacement.

    Attributes:
        beta: Share of the entries, 0 < beta <= 1.
        shared: False: every input and every output has its own draw.  True: all inputs share one draw of outputs, and
            all outputs share one draw of inputs; this is another estimator, and a cheaper one.
    """

    beta: float
    shared: bool = False


def norm(w: Matrix, p: float, axis: Axis, where: Array | None = None) -> Vector:
    """Return norms of a matrix: |W_j:|_p of every input j (axis "in") or |W_:k|_p of every output k (axis "out").

    >>> norm(jnp.array([[3.0, 4.0], [0.0, 2.0]]), 2.0, "in").tolist()
    [5.0, 2.0]

    Args:
        w: Matrix [in, out].
        p: Which norm: 0 counts nonzeros; math.inf is allowed.
        axis: "in" or "out".
        where: Mask of the entries that count, which broadcasts against w; None: all of them.

    Returns:
        The norms, [in] or [out].
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
    scaled = divide(w, largest)  # otherwise small weights would underflow
    return jnp.squeeze(largest, along) * jnp.sum(scaled**p, axis=along) ** (1 / p)


def activations() -> Term:
    """Make a term from norms of activations, divided by sqrt(samples).

    On the side "in" it is |X_:j|_2 of every input j, on the side "out" |Y_:k|_2 of every output k.

    Returns:
        The term, which needs `stats`.
    """
    return lambda w, stats, key, axis: activation_norms(w, stats, axis)


def given(norms: Vector) -> Term:
    """Make a term from norms that the caller computed.

    Args:
        norms: The norms, [in] or [out].

    Returns:
        The term.
    """
    return lambda w, stats, key, axis: _of_length(norms, w, axis, "norms")


def weights(p: float = 1.0, sampling: Sampling | None = None) -> Term:
    """Make a term, a factor of a score, from norms of the weights of a matrix W [in, out].

    The term is called with a side.  For "in" it returns |W_j:|_p of every input j, for "out" |W_:k|_p of every output
    k.

    Args:
        p: Which norm: 0 (number of nonzeros), or at least 1 (math.inf included).
        sampling: Compute the norms from entries drawn at random; None: from all entries.

    Returns:
        The term: (|W|, stats, key, side) -> norms [in] or [out].  With `sampling` it needs a key.
    """
    if not (p == 0 or p >= 1):
        raise ValueError(f"p={p}; allowed: 0, or at least 1 (math.inf included)")
    if sampling is not None and not 0 < sampling.beta <= 1:
        raise ValueError(f"beta={sampling.beta}; allowed: 0 < beta <= 1")

    if sampling is not None:
        return Sampled(p, sampling)
    return lambda w, stats, key, axis: norm(w, p, axis)


def ratio(a: Term, b: Term) -> Term:
    """Make a term from two others: the quotient a / b, and 0 where b is 0.

    Args:
        a: A term.
        b: A term.

    Returns:
        The term.
    """
    return lambda *arguments: divide(a(*arguments), b(*arguments))


class Sampled(NamedTuple):
    """A term of sampled norms, which `score` computes in a program of its own.

    The draws take long to compile, and this program is the same for every beta.

    Attributes:
        p: Which norm.
        sampling: The share of the entries.
    """

    p: float
    sampling: Sampling

    def __call__(self, w: Matrix, stats: Statistics | None, key: Key | None, axis: Axis) -> Vector:
        """Return the norms, as a `Term` does."""
        if key is None:
            raise ValueError("key=None; allowed: a key, because this score samples")
        tau = max(1, math.floor(self.sampling.beta * min(w.shape) + 1e-9))
        return _sampled(w, key, tau, self.p, axis, self.sampling.shared)


@partial(jax.jit, static_argnames=("p", "axis", "shared"))
def _sampled(w: Matrix, key: Key, tau: Array | int, p: float, axis: Axis, shared: bool) -> Vector:
    """Return norms of tau entries drawn at random: those with the tau smallest random words.

    Ties, of probability about tau / 2^31, go to the first entry.
    """
    w = w.astype(wide(w.dtype))
    rows = w if axis == "in" else w.T
    words = random_words.bits(key, (1 if shared else len(rows), rows.shape[1]), jnp.uint32) >> 1
    return norm(rows, p, "in", masks.least(words.astype(jnp.int32), tau, "input"))


def _of_length(vector: Vector, w: Matrix, axis: Axis, name: str) -> Vector:
    size = w.shape[0 if axis == "in" else 1]
    if vector.shape != (size,):
        raise ValueError(f"{name} has shape {vector.shape}; allowed: ({size},) on the {axis} side of W {w.shape}")
    return vector.astype(w.dtype)


def activation_norms(w: Matrix, stats: Statistics | None, axis: Axis) -> Vector:
    """Return the norms of the activations: |X_:j|_2 of every input j, or |Y_:k|_2 of every output k.

    Args:
        w: |W| [in, out].
        stats: Statistics of the layer.  None raises a ValueError.
        axis: "in" or "out".

    Returns:
        The norms, [in] or [out], in the dtype of w.
    """
    if stats is None:
        raise ValueError("stats=None; allowed: Statistics, because this score needs activations")
    return _of_length((input_norm if axis == "in" else output_norm)(stats), w, axis, "stats")
