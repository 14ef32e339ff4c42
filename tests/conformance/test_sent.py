"""What a jitted round sends is what `compress` gives for the vector that was handed to it, bit for bit.

Default compiler, float32 and float64, sizes at which XLA fuses loops.  The compressor reports from inside the compiled
step what it was handed and what it made of it; another program then compresses the reported vectors.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.algorithms.fedp3 import sketched
from commjax.core import base, runner
from commjax.data import embedded, partition, stacked
from commjax.data.stacked import ClientData
from commjax.devices.mesh import client_mesh
from commjax.integrations import optax as cj_optax
from commjax.problems import constants, logistic

pytestmark = pytest.mark.slow

N, ROWS, D, ROUNDS = 37, 20, 123, 8
INF = float("inf")

# (compressor, entries that every message has, or None where they are not counted)
COMPRESSORS = [
    (compressors.top_k(5), 5),
    (compressors.rand_k(4), 4),  # Floyd's draws
    (compressors.rand_k(40), 40),  # the largest random words
    (compressors.comp(2, 40), 2),  # candidates and their ranks
    (compressors.comp(30, 40), 30),  # a threshold, then random words
    (compressors.mix(2, 3), 5),
    (compressors.natural(), D),
    (compressors.dithering(4), None),
    (compressors.ternary(INF), None),
    (compressors.scaled_sign(), D),
    (compressors.perm_k(), None),
    (compressors.m_nice(9, compressors.comp(1, 30)), None),
    (compressors.scaled(0.3, compressors.comp(2, 40)), 2),
    (compressors.leafwise(lambda d: compressors.top_k(max(1, d // 10))), None),
]
BY_NAME = {one.name: (one, entries) for one, entries in COMPRESSORS}


def problem(dtype):
    """Sparse logistic regression whose gradients have a different rounding in every fused loop."""
    rng = np.random.default_rng(0)
    features = (rng.random((N, ROWS, D)) < 0.1) * 1.0
    labels = np.sign(rng.standard_normal((N, ROWS)))
    arrays = (features, labels, np.full((N, ROWS), 1 / ROWS))
    return jnp.asarray(rng.standard_normal(D) * 0.3, dtype), ClientData(*(jnp.asarray(a, dtype) for a in arrays))


def loss(x, data):
    return logistic.loss(x, data, 0.03)


class Report(NamedTuple):
    """What the compressor of every client was handed in one round, and what it made of it; one row a client."""

    keys: np.ndarray
    ids: np.ndarray
    xs: np.ndarray
    values: np.ndarray
    bits: np.ndarray


def reporting(compressor, reports):
    """The same compressor; a compiled step that compresses appends a `Report` to `reports`."""

    def report(*columns):
        reports.append(Report(*map(np.asarray, columns)))
        return np.zeros_like(columns[-1])

    def compress(key, x, id=0, n=1):
        value, bits = compressor.compress(key, x, id, n)
        # One call for all clients.  Zeros come back and are added to the bits, so that the call is not removed.
        nothing = jax.pure_callback(
            report, bits, jax.random.key_data(key), jnp.asarray(id), x, value, bits, vmap_method="broadcast_all"
        )
        return base.Message(value, bits + nothing)

    return compressor._replace(compress=compress)


@cache
def by_itself(compressor):
    """`compress` of all clients in a program of its own."""
    return jax.jit(jax.vmap(lambda key, x, id: compressor.compress(jax.random.wrap_key_data(key), x, id, N)))


def check_report(compressor, entries, report):
    """The report of one round is what another program makes of x and what the encoder emits."""
    keys, ids, xs, values, bits = report
    assert sorted(ids) == list(range(N))
    again = by_itself(compressor)(keys, xs, ids)
    np.testing.assert_array_equal(values, again.value)
    assert values.dtype == xs.dtype
    if entries is not None:
        np.testing.assert_array_equal(np.count_nonzero(values, axis=1), entries)
    client = int(np.argmax(bits))  # one that takes part
    key = jax.random.wrap_key_data(keys[client])
    sent = compressor.encode(key, jnp.asarray(xs[client]), int(ids[client]), N)
    assert bits[client] == 8 * len(sent)
    decoded = compressor.decode(key, sent, jnp.asarray(xs[client]), int(ids[client]), N)
    np.testing.assert_array_equal(np.asarray(decoded), values[client])


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
def test_a_jitted_round_sends_what_compress_gives_for_what_it_was_handed(name, dtype):
    (compressor, entries), reports = BY_NAME[name], []
    algorithm = ef_bv.ef_bv(jax.value_and_grad(loss), reporting(compressor, reports))
    x, data = problem(dtype)
    state, hparams = algorithm.init(x, jnp.arange(N)), ef_bv.HParams(0.05, 1.0, 0.3)
    step = jax.jit(algorithm.step)
    for _ in range(ROUNDS):
        before = state.clients.shift
        state, metrics = step(jax.random.key(3), hparams, state, data)
        jax.block_until_ready(state)
        (report,) = reports
        # The client keeps what it sent: h_i + 1 * d_i, one rounding.
        np.testing.assert_array_equal(state.clients.shift, np.asarray(before) + report.values)
        assert metrics.bits_up == pytest.approx(report.bits.mean(), rel=1e-6)
        check_report(compressor, entries, report)
        reports.clear()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
def test_a_sketched_round_and_an_optax_step_send_likewise(dtype):
    x, data = problem(dtype)
    reports, compressor = [], compressors.comp(2, 40)
    algorithm = sketched.sketched(jax.value_and_grad(loss), sketch=reporting(compressor, reports))
    jax.block_until_ready(
        jax.jit(algorithm.step)(jax.random.key(3), sketched.HParams(0.1), algorithm.init(x, jnp.arange(N)), data)
    )
    check_report(compressor, None, *reports)
    reports.clear()

    aggregate = cj_optax.ef_bv(reporting(compressor, reports), N, jax.random.key(5), lam=1.0, nu=1.0)

    @jax.jit
    def update(x, state, data):
        return aggregate.update(jax.vmap(jax.grad(loss), (None, 0))(x, data), state, x)

    jax.block_until_ready(update(x, aggregate.init(x), data))
    check_report(compressor, 2, *reports)


def test_two_devices_follow_one_for_hundreds_of_rounds():
    """A selection that depends on the program flips a coordinate sooner or later, and the runs part (in round 123)."""
    dataset = embedded.breast_cancer()
    rows, d, n = partition.blocks(len(dataset.labels), 100, seed=0), dataset.features.shape[1], 100
    compressor, data = compressors.comp(1, d // 2), stacked.stack(dataset, rows)
    smoothness = constants.smoothness(logistic.constants(dataset, rows, 0.1).L_i, mu=0.1)  # as `experiments.launch`
    hparams = ef_bv.theoretical(compressor.constants(d, n), smoothness)
    algorithm = ef_bv.ef_bv(jax.value_and_grad(partial(logistic.loss, mu=0.1)), compressor)
    inputs = (jax.random.key(0), algorithm, hparams, algorithm.init(jnp.zeros(d), jnp.arange(n)), data, 400)
    one, seen = runner.run(*inputs)
    two, found = runner.run(*inputs, mesh=client_mesh(2))
    np.testing.assert_allclose(found.loss, seen.loss, rtol=1e-12)
    np.testing.assert_allclose(two.server.params, one.server.params, rtol=1e-10, atol=1e-12)
