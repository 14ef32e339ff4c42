"""Joins of scores: how the norms u of the inputs and v of the outputs meet |W| (`commjax.pruning.scores`)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Matrix = Float[Array, "i o"]
Norms = Float[Array, "#i #o"]  # norms of inputs [in, 1] or of outputs [1, out]


def divide(a: Array, b: Array) -> Array:
    """Divide; the quotient is 0 where b is 0.

    Args:
        a: Numerators.
        b: Denominators, which broadcast against them.

    Returns:
        The quotients.
    """
    return jnp.where(b == 0, 0, a / b)


def relative(w: Matrix, *norms: Norms) -> Matrix:
    """S1: |W| / u + |W| / v, where a quotient by a zero norm is 0.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return sum((divide(w, norm) for norm in norms[1:]), divide(w, norms[0]))


def relative_to_sum(w: Matrix, *norms: Norms) -> Matrix:
    """S2: |W| / (u + v), and 0 where u + v is 0.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return divide(w, sum(norms[1:], norms[0]))


def plain(w: Matrix, *norms: Norms) -> Matrix:
    """S3: |W| (u + v).

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return w * sum(norms[1:], norms[0])


def harmonic(w: Matrix, *norms: Norms) -> Matrix:
    """S4: |W| / (1/u + 1/v), and 0 where a norm is 0.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return w / sum((1 / norm for norm in norms[1:]), 1 / norms[0])


def root(w: Matrix, *norms: Norms) -> Matrix:
    """The join of the squared objective: |W| sqrt(u^2 + v^2).

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return w * jnp.sqrt(sum((norm * norm for norm in norms[1:]), norms[0] * norms[0]))
