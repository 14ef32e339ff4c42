"""A quadratic and a share of a logistic loss as one function, so that one program serves the tests of both."""

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def data_type(features: np.ndarray, labels: np.ndarray, **more: np.ndarray) -> Any:
    """Return the type of the clients' data.

    Its fields are H and c of the quadratic, features and labels of the logistic loss, the share of that loss, and
    `more`. All but H and c have defaults; the default of the share is 0.
    """
    defaults = (features, labels, np.zeros(len(labels)), *more.values())
    return namedtuple("Data", ("H", "c", "features", "labels", "share", *more), defaults=defaults)


def mixed_loss(x: jax.Array, data: Any, mu: float) -> jax.Array:
    """Return the loss of one client; the logistic loss has mu |x|^2 / 2."""
    zero = jnp.zeros((), x.dtype)
    fit = jnp.mean(jnp.logaddexp(zero, -data.labels * (data.features @ x))) + mu / 2 * jnp.vdot(x, x)
    return (x - data.c) @ data.H @ (x - data.c) / 2 + data.share * fit
