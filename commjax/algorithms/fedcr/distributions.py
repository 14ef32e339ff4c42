"""The distributions of FedCR: of the features of a row, and of the features of a class over all clients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from commjax.core import tree

# Lower limit of a standard deviation inside a logarithm.
LEAST = 1e-8


class Normal(NamedTuple):
    """Independent normal variables.

    Attributes:
        mean: the means.
        scale: the standard deviations.
    """

    mean: Float[Array, "*rows z"]
    scale: Float[Array, "*rows z"]


def gaussian(outputs: Float[Array, "b zz"]) -> Normal:
    """Read the means and standard deviations of the features from the outputs of a network.

    Args:
        outputs: [b, 2 z] for b rows.  The first z columns are the means; the softplus of the others are the standard
            deviations.

    Returns:
        The distribution of z features for each row.
    """
    mean, raw = jnp.split(outputs, 2, axis=-1)
    return Normal(mean, jax.nn.softplus(raw))


def divergence(q: Normal, p: Normal) -> Float[Array, "*rows"]:
    """Return the divergence KL(q || p) of each row, summed over the features.

    >>> divergence(Normal(jnp.zeros(2), jnp.ones(2)), Normal(jnp.ones(2), jnp.ones(2))).item()
    1.0
    """
    logs = jnp.log(jnp.maximum(p.scale, LEAST)) - jnp.log(jnp.maximum(q.scale, LEAST))
    return jnp.sum(logs + (q.scale**2 + (q.mean - p.mean) ** 2) / (2 * p.scale**2) - 0.5, axis=-1)


class Experts(NamedTuple):
    """For each class a product of normal densities, which is normal again.

    Attributes:
        precision: sum of the precisions (1 / variance) of the factors.
        weighted: sum of the precisions times the means of the factors.
    """

    precision: Float[Array, "classes z"]
    weighted: Float[Array, "classes z"]


def experts(features: Normal, targets: Int[Array, "b"], real: Array, classes: int) -> Experts:
    """Multiply, for each class, the feature distributions of the client's rows of that class.

    Args:
        features: distribution of the features of each row, [b, z].
        targets: class of each row, [b].
        real: whether each row is data, not padding, [b].
        classes: number of classes.

    Returns:
        The products, [classes, z].
    """
    belongs = (targets[None] == jnp.arange(classes, dtype=targets.dtype)[:, None]) & real[None]
    precision = 1 / features.scale**2
    chosen = belongs.astype(precision.dtype)
    return Experts(chosen @ precision, chosen @ (precision * features.mean))


def product(experts: Experts) -> Normal:
    """Return the distribution of each class: the product of the experts and of a standard normal density."""
    precision = 1 + experts.precision
    return Normal(experts.weighted / precision, 1 / jnp.sqrt(precision))


def known(hparams: Any, old: Normal, experts: Experts) -> Normal:
    """Update the class distributions r(z | y), the distribution of the features z of class y over all clients.

        r <- (1 - mix) r + mix product(experts)        for means and standard deviations

    A class of which no client has a row keeps its distribution.

    Args:
        hparams: hyperparameters with `mix`.
        old: r(z | y) before the round, [classes, z].
        experts: the sum of `experts_of` over the clients.

    Returns:
        The new distributions, [classes, z].
    """
    new, mix, held = product(experts), hparams.mix, experts.precision > 0

    def mixed(old: Array, new: Array) -> Array:
        return jnp.where(held, tree.add_scaled(tree.scale(1 - mix, old), mix, new), old)

    return jax.tree.map(mixed, old, new)
