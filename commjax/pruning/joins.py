"""Joins: combine |W| with the norms u of the inputs and v of the outputs into a score (`commjax.pruning.scores`).

S1 to S4 are the names of the joins in Sec. E.3.3 of the thesis.
"""

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
    """Return |W| / u + |W| / v (S1), where a quotient by a zero norm is 0.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return sum((divide(w, norm) for norm in norms[1:]), divide(w, norms[0]))


def relative_to_sum(w: Matrix, *norms: Norms) -> Matrix:
    """Return |W| / (u + v) (S2), and 0 where u + v is 0.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return divide(w, sum(norms[1:], norms[0]))


def plain(w: Matrix, *norms: Norms) -> Matrix:
    """Return |W| (u + v) (S3).

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return w * sum(norms[1:], norms[0])


def harmonic(w: Matrix, *norms: Norms) -> Matrix:
    """Return |W| / (1/u + 1/v) (S4), and 0 where a norm is 0.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return w / sum((1 / norm for norm in norms[1:]), 1 / norms[0])


def root(w: Matrix, *norms: Norms) -> Matrix:
    """Return |W| sqrt(u^2 + v^2), the join of the squared objective.

    Args:
        w: |W| [in, out].
        *norms: u [in, 1] and v [1, out], or one of them.

    Returns:
        The matrix [in, out].
    """
    return w * jnp.sqrt(sum((norm * norm for norm in norms[1:]), norms[0] * norms[0]))
