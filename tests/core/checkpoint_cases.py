"""A state of every dtype and its checkpoint: what the tests of checkpoints share."""

import jax.numpy as jnp
import numpy as np

from commjax.core import checkpoint
from commjax.core.base import State

HISTORY = {"loss": np.array([1.0, 0.1 + 0.2]), "eval/accuracy": np.array([[0.5, np.nan], [1e-300, -0.0]])}
IDENTITY = {"key": "00", "hparams": "[0.1]"}


def state(dtype=jnp.float64):
    values = np.random.default_rng(0).standard_normal((3, 4))
    server = {
        "round": jnp.asarray(7, jnp.int32),
        "params": {"w": jnp.asarray(values, dtype), "empty": jnp.zeros((0, 2))},
    }
    return State(
        server,
        {
            "id": jnp.arange(3),
            "h": [jnp.asarray(values * 1e-3, dtype)],
            "on": jnp.asarray([True, False, True]),
        },
    )


def saved(path, content=None):
    checkpoint.save(path, state() if content is None else content, HISTORY, IDENTITY)
    return path


LIKE = {"x": jnp.ones(2)}
