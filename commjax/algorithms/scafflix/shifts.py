"""Scafflix: the state before the first round, and control variates h_i with which the method may begin."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.flix import checked_alpha, checked_optimum
from commjax.algorithms.scafflix.communication import Client, Server
from commjax.core import tree
from commjax.core.base import Params, State


def initializer(personal: bool, by_rounds: bool) -> Callable[..., State]:
    """Make the `init` of Scafflix.

    Args:
        personal: whether clients mix xbar with x_i*, which `init` then needs.
        by_rounds: whether a step is a whole round, so that no e_i has to be kept between steps.

    Returns:
        (params, ids, optimum=None, shift=None, alpha=None) -> State.
    """

    def init(
        params: Params,
        ids: Int[Array, "n"],
        optimum: PyTree | None = None,
        shift: PyTree | None = None,
        alpha: ArrayLike | None = None,
    ) -> State:
        zeros = tree.repeat(tree.zeros_like(params), len(ids))
        if shift is not None:
            shapes = jax.tree.map(jnp.shape, shift)
            if shapes != jax.tree.map(jnp.shape, zeros):
                raise ValueError(
                    f"shift must have one row of the params for each of {len(ids)} clients, got shapes {shapes}"
                )
            check_shift(shift, ids, alpha if personal else 1.0)
        rows = Client(
            id=ids,
            drift=None if by_rounds else zeros,
            shift=zeros if shift is None else shift,
            optimum=checked_optimum(params, ids, optimum) if personal else None,
        )
        counter = jnp.zeros((), jnp.int32)
        return State(Server(counter, params, counter, counter), rows)

    return init


def check_shift(shift: PyTree, ids: Array, alpha: ArrayLike | None) -> None:
    """Raise a ValueError unless sum_i alpha_i h_i^0 = 0, up to rounding.

    Args:
        shift: h_i^0, with one row per client.
        ids: numbers of the clients, [n].
        alpha: weight of the global model, one number or one per client (indexed by id).
    """
    if alpha is None:
        raise ValueError("init with shift= needs alpha= as well, to check that sum_i alpha_i h_i = 0")
    weights = np.broadcast_to(checked_alpha(alpha), (len(ids),)) if np.ndim(alpha) == 0 else checked_alpha(alpha)[ids]
    for leaf in map(np.asarray, jax.tree.leaves(shift)):
        total = np.tensordot(weights, leaf.astype(np.float64), axes=1)
        scale = np.tensordot(weights, np.abs(leaf.astype(np.float64)), axes=1)
        if not np.all(np.abs(total) <= 8 * len(ids) * jnp.finfo(leaf.dtype).eps * scale):
            worst = float(np.max(np.abs(total)))
            raise ValueError(
                f"shift: sum_i alpha_i h_i must be 0 and is {worst:.3g} in some coordinate; allowed: zeros, or rows "
                "made by scafflix.admissible_shift (h_i = grad f_i alone would make the start a fixed point)"
            )


def admissible_shift(gradients: PyTree, alpha: ArrayLike) -> PyTree:
    """Return control variates h_i^0 to begin with, which satisfy sum_i alpha_i h_i^0 = 0.

        h_i^0 = grad f_i(xtilde_i^0) - sum_j alpha_j grad f_j(xtilde_j^0) / sum_j alpha_j

    The sum costs one extra aggregation.

    Args:
        gradients: grad f_i(xtilde_i^0), with one row per client.
        alpha: weight of the global model, one number or one per client.

    Returns:
        h_i^0, a pytree like `gradients`.

    Thesis: Sec. 3.2.
    Differs (docs/errata.md): S2 (the thesis takes h_i^0 = grad f_i, at which the method never moves).
    """
    weights = np.broadcast_to(checked_alpha(alpha), (len(jax.tree.leaves(gradients)[0]),))
    share = weights / weights.sum()

    def centered(leaf: Array) -> Array:
        return leaf - jnp.tensordot(jnp.asarray(share, leaf.dtype), leaf, axes=1)[None]

    return jax.tree.map(centered, gradients)
