"""Runs of EF-BV with a cohort on the host: what the tests of clients on the host share."""

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.devices import host_clients

KEY = jax.random.key(4)


NICE = ef_bv.ef_bv(lambda x, data: (jnp.sum((x - data) ** 2), 2 * (x - data)), compressors.top_k(2))


def nice_ef_bv(n, d=4):
    return NICE, ef_bv.HParams(0.01, 0.1, 0.5), host_clients.start(NICE, jnp.ones(d), n)


def run_of(many, rounds, fetch=lambda ids: ids[:, None] * np.ones(4)):
    return host_clients.run(KEY, NICE, ef_bv.HParams(0.01, 0.1, 0.5), many, fetch, rounds, size=5)


HPARAMS, WIDE = ef_bv.HParams(0.01, 0.1, 0.5), lambda ids: ids[:, None] * np.ones(4)
