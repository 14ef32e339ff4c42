"""Robust reducers against NumPy, on one device and on several, and methods that use them with wrong clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats

from commjax import compressors
from commjax.algorithms import ef_bv, fedavg, scaffold
from commjax.core import robust, rounds, runner
from commjax.devices import host_clients
from commjax.devices.mesh import AXIS, client_mesh
from commjax.problems import quadratic
from tests.registry import PROBLEM, VALUE_AND_GRAD, D, N, cast, start

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
ROWS = {"w": RNG.standard_normal((9, 4, 2)) * 10, "b": RNG.standard_normal(9)}
PRESENT = np.array([True] * 4 + [False] + [True] * 4)
REDUCERS = {"median": robust.median(), "trimmed": robust.trimmed_mean(0.3), "clipped": robust.clipped_mean(5.0)}


def oracle(name, rows):
    """Of all rows, all of which count"""
    if name == "median":
        return {key: np.median(leaf, axis=0) for key, leaf in rows.items()}
    if name == "trimmed":
        return {key: stats.trim_mean(leaf, 0.3, axis=0) for key, leaf in rows.items()}
    norms = [np.sqrt((rows["w"][i] ** 2).sum() + rows["b"][i] ** 2) for i in range(len(rows["b"]))]
    shorter = np.minimum(1, 5.0 / np.array(norms))
    return {key: np.tensordot(shorter, leaf, 1) / len(shorter) for key, leaf in rows.items()}


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("count", [9, 8, 1])
def test_a_reducer_is_numpy_s_of_the_messages_that_count(name, count):
    present = np.arange(9) < count if count != 8 else PRESENT
    found = REDUCERS[name].reduce(jax.tree.map(jnp.asarray, ROWS), jnp.asarray(present))
    wanted = oracle(name, {key: leaf[present] for key, leaf in ROWS.items()})
    for key, leaf in wanted.items():
        np.testing.assert_allclose(found[key], leaf, rtol=1e-13, atol=1e-14)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float64")}


def test_a_share_of_messages_is_trimmed_as_written_and_dtypes_stay():
    rows, everyone = jnp.arange(10, dtype=jnp.bfloat16) ** 2, jnp.ones(10, bool)
    # 0.3 of 10 are 3 at each end, although 0.3 is less than 3/10 in binary; 9, 16, 25, 36 stay.
    assert REDUCERS["trimmed"].reduce(rows.astype(jnp.float32), everyone) == (9 + 16 + 25 + 36) / 4
    assert robust.trimmed_mean(0.0).reduce(rows.astype(jnp.float32), everyone) == 28.5
    for reducer in REDUCERS.values():
        assert reducer.reduce(rows, everyone).dtype == jnp.bfloat16


def test_numbers_that_no_reducer_takes_are_refused():
    for trim in (-0.1, 0.5, float("nan")):
        with pytest.raises(ValueError, match=r"trim=.*; allowed: 0 <= trim < 0.5"):
            robust.trimmed_mean(trim)
    for norm in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"norm=.*; allowed: positive and finite"):
            robust.clipped_mean(norm)


def test_messages_that_are_not_finite_or_absurd_are_left_out_with_their_losses():
    rows = np.concatenate([ROWS["w"][:5], np.full((4, 4, 2), 1.0)])
    rows[5, 0, 0], rows[6, 1, 1], rows[7, 2, 0] = np.nan, -np.inf, 1e300
    losses = jnp.asarray([1.0] * 5 + [np.nan, np.inf, 5.0, 2.0])
    value, loss = rounds.reduced(robust.median(), jnp.asarray(rows), losses)
    np.testing.assert_allclose(value, np.median(rows[[0, 1, 2, 3, 4, 8]], axis=0), rtol=1e-14)
    assert loss == pytest.approx(7 / 6)


@pytest.mark.parametrize(
    "dtype, most", [("float32", 1.844e19), ("bfloat16", 1.844e19), ("float64", 1.340e154), ("float16", 65504)]
)
def test_the_largest_number_of_a_message_is_the_root_of_the_largest_of_its_dtype(dtype, most):
    assert rounds.largest(jnp.dtype(dtype)) == pytest.approx(most, rel=1e-3)
    fine = jnp.asarray([0.99 * rounds.largest(jnp.dtype(dtype)), -1.0], dtype)
    assert rounds.acceptable({"a": fine, "count": jnp.ones((), jnp.int32)})
    if dtype != "float16":
        assert not rounds.acceptable({"a": fine * 2})
        assert np.isfinite(np.square(np.asarray(fine, "float64" if dtype == "float64" else "float32"))).all()
    assert not rounds.acceptable(fine.at[1].set(jnp.nan)) and not rounds.acceptable(fine.at[1].set(-jnp.inf))


@pytest.mark.parametrize("n, devices", [(8, 4), (7, 4)])  # 7: the last row fills up a device and is no client
def test_rows_of_all_devices_are_reduced_and_rows_that_fill_up_do_not_count(n, devices):
    rows = np.concatenate([ROWS["w"][:n], np.full((8 - n, 4, 2), 77.0)])
    rows[1] = np.nan
    axis = AXIS if n == 8 else rounds.Axis(AXIS, n)
    mesh, rows_of_device = client_mesh(devices), P(AXIS)

    def reduced(rows, losses):
        return rounds.reduced(robust.trimmed_mean(0.2), rows, losses, axis)

    mapped = jax.shard_map(reduced, mesh=mesh, in_specs=(rows_of_device, rows_of_device), out_specs=P())
    result, loss = mapped(jnp.asarray(rows), jnp.arange(8.0))
    left = np.delete(rows[:n], 1, axis=0)
    np.testing.assert_allclose(result, stats.trim_mean(left, 0.2, axis=0), rtol=1e-13)
    assert loss == pytest.approx(np.delete(np.arange(float(n)), 1).mean())


def with_wrong_clients(kind):
    """Two of the eight clients have data that makes their gradients absurd"""
    data = cast(PROBLEM, jnp.float64)
    return data._replace(c=data.c.at[:2].set({"nan": jnp.nan, "far": 1e9}[kind]))


def distance(state):
    return float(np.linalg.norm(state.server.params))


@pytest.mark.parametrize("kind", ["nan", "far"])
def test_a_method_with_a_robust_reducer_stays_with_the_honest_clients_on_any_number_of_devices(kind):
    algorithm = fedavg.fedavg(VALUE_AND_GRAD, steps=2, cohort=7, reduce=robust.median())
    inputs = (
        KEY,
        algorithm,
        fedavg.HParams(0.2),
        algorithm.init(start(jnp.float64), jnp.arange(N)),
        with_wrong_clients(kind),
    )
    state, metrics = runner.run(*inputs, 30)
    assert distance(state) < 20 and np.isfinite(state.server.params).all()
    assert kind == "far" or np.isfinite(metrics.loss).all()
    found, _ = runner.run(*inputs, 30, mesh=client_mesh(3))
    np.testing.assert_allclose(found.server.params, state.server.params, rtol=1e-10)
    plain = fedavg.fedavg(VALUE_AND_GRAD, steps=2, cohort=7)
    spoiled, _ = runner.run(KEY, plain, *inputs[2:], 30)
    assert not distance(spoiled) < 1e6


def test_a_federation_of_few_at_a_time_leaves_wrong_messages_out():
    algorithm = scaffold.scaffold(VALUE_AND_GRAD, steps=2, cohort=6, reduce=robust.median())
    data = jax.tree.map(np.asarray, with_wrong_clients("nan"))
    many = host_clients.start(algorithm, start(jnp.float64), N)
    many, metrics = host_clients.run(
        KEY, algorithm, scaffold.HParams(0.1), many, lambda ids: jax.tree.map(lambda leaf: leaf[ids], data), 4
    )
    assert np.isfinite(many.server.params).all() and np.isfinite(metrics.loss).all()


def test_a_reducer_where_silence_is_a_message_of_zeros_is_refused():
    with pytest.raises(ValueError, match=r"reduce=median: under 3-nice clients that are not drawn send 0"):
        ef_bv.ef_bv(VALUE_AND_GRAD, compressors.m_nice(3), reduce=robust.median())
    algorithm = ef_bv.ef_bv(VALUE_AND_GRAD, compressors.identity(), reduce=robust.median())
    many = host_clients.start(algorithm, start(jnp.float64), N)
    with pytest.raises(ValueError, match=r"median of a cohort of the compressor would not count the absent clients"):
        host_clients.run(KEY, algorithm, ef_bv.HParams(0.1, 1.0, 1.0), many, lambda ids: None, 1, size=3)


def test_the_mean_is_the_default_and_a_trimmed_mean_of_nothing_is_the_mean():
    def params(reduce):
        algorithm = ef_bv.gd(VALUE_AND_GRAD, reduce=reduce)
        hparams = ef_bv.gd_hparams(quadratic.constants(PROBLEM))
        state = algorithm.init(start(jnp.float64), jnp.arange(N))
        return runner.run(KEY, algorithm, hparams, state, cast(PROBLEM, jnp.float64), 3)[0].server.params

    np.testing.assert_allclose(params(robust.trimmed_mean(0.0)), params(None), rtol=1e-12)
    assert len(params(None)) == D
