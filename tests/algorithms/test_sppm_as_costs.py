"""What SPPM-AS pays: bits through hubs, vectors of its solvers, the ledger's cost, memory, and where it does not
run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import sppm_as
from commjax.core import runner
from commjax.devices.mesh import client_mesh, shard_step
from commjax.problems import quadratic
from commjax.prox import cohort, solvers
from commjax.prox.solvers import quasi_newton
from commjax.sampling import samplings
from tests.algorithms.sppm_as_cases import CLUSTERS, DATA, EXACT, KEY, SAMPLINGS, START, D, N, after, newton

pytestmark = pytest.mark.long


def test_hubs_add_up_to_the_same_and_their_bits_are_counted():
    hubs = cohort.Hubs.make([0, 1, 1, 0, 1, 0, 1, 1])  # the first cluster has a hub of its own
    sampling = SAMPLINGS["stratified"]
    flat, _ = after(sppm_as.sppm_as(quadratic.loss, sampling, newton), EXACT)
    found, metrics = after(sppm_as.sppm_as(quadratic.loss, sampling, newton, hubs), EXACT)
    np.testing.assert_allclose(found, flat, rtol=1e-10)
    met = len({int(hubs.of[i]) for i in np.asarray(sampling.sample(jax.random.fold_in(KEY, 0)).ids)})
    assert met == 2 and metrics.hub_rounds == metrics.local_rounds
    assert metrics.bits_hubs == met * 64 * (D + 1) * float(metrics.local_rounds)
    assert metrics.bits_hubs_down == met * 64 * D * float(metrics.local_rounds)
    with pytest.raises(ValueError, match="every number from 0 on used"):
        cohort.Hubs.make([0, 2])


def test_a_hub_that_has_the_whole_cohort_talks_to_the_server_once_a_round():
    """The two prices of `experiments.cohort_squeeze hierarchical`, from the ledger: c1 K + c2, and (c1 + c2) K."""
    c1, c2 = 0.1, 1.0
    hubs = cohort.Hubs.make([next(j for j, ids in enumerate(CLUSTERS) if i in ids) for i in range(N)])
    for name, once in (("block", True), ("stratified", False)):
        _, metrics = after(sppm_as.sppm_as(quadratic.loss, SAMPLINGS[name], newton, hubs), EXACT)
        met = 1 if once else len(CLUSTERS)
        exchange = 64 * (D if once else D + 1)  # a model, or a gradient and a value
        local, between = float(metrics.local_rounds), float(metrics.bits_hubs) / (met * exchange)
        assert local > 1 and between == float(metrics.hub_rounds) == (1 if once else local)
        assert c1 * local + c2 * between == pytest.approx(c1 * local + c2 if once else (c1 + c2) * local)
        assert metrics.bits_hubs_down == met * between * 64 * D


def test_the_cost_is_that_of_the_ledger_flat_under_one_hub_and_over_several():
    def spent(of):
        hubs = None if of is None else cohort.Hubs.make(of)
        algorithm = sppm_as.sppm_as(quadratic.loss, SAMPLINGS["stratified"], lambda hparams: quasi_newton.bfgs(), hubs)
        _, metrics = runner.run(KEY, algorithm, EXACT, algorithm.init(START, jnp.arange(N)), DATA, 3)
        return sppm_as.cost(metrics, 0.1, 1.0), np.asarray(metrics.local_rounds)

    for of, price in (
        (None, lambda K: 0.1 * K),
        (np.zeros(N, int), lambda K: 0.1 * K + 1),
        (np.arange(N), lambda K: 1.1 * K),
    ):
        found, K = spent(of)
        assert found.shape == (3,) and np.all(K > 1)
        np.testing.assert_allclose(found, price(K))


def test_a_solver_with_local_work_says_why_it_does_not_run_on_a_mesh():
    algorithm = sppm_as.sppm_as(quadratic.loss, SAMPLINGS["nice"], lambda hparams: solvers.scaffnew(0.1, 0.5))
    step = shard_step(algorithm, client_mesh(2))
    with pytest.raises(ValueError, match="on a mesh"):
        step(KEY, EXACT, algorithm.init(START, jnp.arange(N)), DATA)


def test_solvers_that_send_more_vectors_pay_for_them():
    one, two = (
        after(sppm_as.sppm_as(quadratic.loss, SAMPLINGS["nice"], newton, vectors=vectors), EXACT)[1]
        for vectors in (1.0, 2.0)
    )
    assert two.bits_up * (D + 1) == one.bits_up * (2 * D + 1) and two.bits_down == one.bits_down


@pytest.mark.parametrize("hubs, both", [([0, 1] * (N // 2), 2), ([0] * N, 1)])
def test_solvers_whose_clients_are_sent_more_vectors_pay_for_them(hubs, both):
    one, two = (
        after(
            sppm_as.sppm_as(quadratic.loss, SAMPLINGS["full"], newton, cohort.Hubs.make(hubs), received=received), EXACT
        )[1]
        for received in (1.0, 2.0)
    )
    assert two.bits_down == 2 * one.bits_down > 0 and two.bits_up == one.bits_up and two.bits_hubs == one.bits_hubs
    assert two.bits_hubs_down == both * one.bits_hubs_down > 0  # a hub that has the whole cohort is sent x once


def test_memory_grows_with_the_cohort_and_not_with_the_number_of_clients():
    def working_memory(n, tau, K=EXACT.rounds):
        data = jax.tree.map(jnp.asarray, quadratic.random(0, n, 16, mu=0.5, L=2.0))
        algorithm = sppm_as.sppm_as(quadratic.loss, samplings.nice(n, tau), lambda hparams: quasi_newton.bfgs(10))
        state = algorithm.init(jnp.ones(16), jnp.arange(n))
        compiled = jax.jit(algorithm.step).lower(KEY, EXACT._replace(rounds=K), state, data).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_client = 16 * 16 * 8
    assert working_memory(256, 4) - working_memory(16, 4) < 16 * one_client  # of 240 more clients; ids are drawn
    assert working_memory(256, 64) - working_memory(256, 4) > 40 * one_client
    assert working_memory(256, 4, 5) == working_memory(256, 4, 500)  # nothing is kept of the local rounds
