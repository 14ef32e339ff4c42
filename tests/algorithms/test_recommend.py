"""The recommender: from loss and data alone, it charges what the ledger charges, and its costs change its choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import sppm_as
from commjax.algorithms.recommend import pilot, recommend, solver_for
from commjax.core import runner
from commjax.problems import quadratic
from commjax.prox.cohort import Hubs

pytestmark = pytest.mark.long

N, D, KEY = 6, 3, jax.random.key(0)
PROBLEM = quadratic.random(1, N, D, mu=1.0, L=4.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
OPTIMUM = jnp.asarray(quadratic.optimum(PROBLEM).params)
START = OPTIMUM + 3.0
CLUSTERS = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
HUB = Hubs.make(np.zeros(N, int))
BUDGET = {"local_rounds": (1, 4), "rounds": 20, "seeds": 2}


@pytest.fixture(scope="module")
def study():
    return pilot(KEY, quadratic.loss, START, DATA, CLUSTERS, hubs=HUB, **BUDGET)


@pytest.mark.parametrize("c1,c2", [(1.0, 0.0), (0.05, 1.0)])
def test_the_predicted_cost_is_what_the_ledger_of_the_same_run_charges(study, c1, c2):
    """Quadratic clients are their own model, so that prediction and measurement agree if the same cohorts are drawn."""
    advice = study.recommend(0.1, c1, c2)
    algorithm = runner.observe(
        sppm_as.sppm_as(quadratic.loss, advice.sampling, advice.solver, advice.hubs),
        distance=lambda state, batch: jnp.sum((state.server.params - OPTIMUM) ** 2),
    )
    hparams = runner.stack([sppm_as.HParams(advice.gamma, advice.K, 0.0)])
    state = algorithm.init(START, jnp.arange(N))
    _, metrics = runner.sweep(jax.random.split(KEY, 2), algorithm, hparams, state, DATA, 20)
    reached = np.asarray(metrics.distance)[0] <= 0.1 * 27
    counted = sppm_as.Metrics(*(getattr(metrics, name) for name in sppm_as.Metrics._fields))
    T, spent = reached.argmax(axis=1), np.asarray(sppm_as.cost(counted, c1, c2))[0]
    assert reached.any(axis=1).all() and T.mean() == advice.T
    assert advice.cost == pytest.approx(np.mean([row[:rounds].sum() for row, rounds in zip(spent, T)]), rel=1e-9)


def test_the_costs_decide_between_many_short_rounds_and_few_long_ones(study):
    """Two settings by hand: four rounds of 2 aggregations, and one round of 12."""
    fraction = np.array([[[1.0, 0.8, 0.5, 0.2, 0.01]], [[1.0, 0.01, 0.01, 0.01, 0.01]]])
    local = np.array([[[2.0] * 5], [[12.0] * 5]])
    sampling = study.settings[0][0]
    made = study._replace(
        settings=[(sampling, 1.0, 1), (sampling, 9.0, 8)],
        fraction=fraction,
        local_rounds=local,
        hub_rounds=np.ones((2, 1, 5)),
    )
    flat, hubs = made.recommend(0.1, 1.0, 0.0), made.recommend(0.1, 0.1, 1.0)
    assert (flat.gamma, flat.K, flat.T, flat.cost) == (1.0, 1, 4.0, 8.0)
    assert (hubs.gamma, hubs.K, hubs.T, hubs.evaluations) == (9.0, 8, 1.0, 12.0) and hubs.cost == pytest.approx(2.2)
    assert made.recommend(0.6, 1.0, 0.0).cost == 4.0  # less accuracy, fewer rounds


def test_the_text_says_what_to_do_and_what_the_pilot_took(study):
    advice = study.recommend(0.1, 0.05, 1.0)
    text = str(advice)
    for part in ("0.1 of the first squared distance", "c1 = 0.05, c2 = 1 (1 hub)", advice.sampling.name, "of lbfgs"):
        assert part in text
    assert f"gamma = {advice.gamma:.3g}, K = {advice.K}" in text and f"cost {advice.cost:.3g}" in text
    assert f"{advice.spent} aggregations over all clients and one Hessian" in text and 1 <= advice.spent <= 60


def test_one_call_puts_all_clients_under_one_hub_where_c2_is_charged():
    advice = recommend(KEY, quadratic.loss, START, DATA, CLUSTERS, 0.1, c1=0.1, c2=1.0, **BUDGET)
    assert advice.hubs is not None and advice.hubs.count == 1


def test_bad_wishes_are_refused(study):
    for accuracy in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"accuracy=.*; allowed: 0 < accuracy < 1"):
            study.recommend(accuracy)
    with pytest.raises(ValueError, match="not both 0"):
        study.recommend(0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"c2=1.0; allowed: 0 without hubs"):
        study._replace(hubs=None).recommend(0.1, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"allowed: at least .*, which the pilot reached in 20 rounds"):
        study.recommend(1e-12)
    with pytest.raises(ValueError, match="params has 1001 numbers; allowed: at most 1000"):
        pilot(KEY, lambda x, rows: jnp.sum((x - rows) ** 2), jnp.zeros(1001), jnp.ones((4, 1001)), CLUSTERS[:2])


def test_the_solver_follows_from_what_a_local_round_is():
    assert [solver_for(True).name, solver_for(True, "evaluations").name, solver_for(False).name] == [
        "cg",
        "lbfgs",
        "adam",
    ]
    with pytest.raises(ValueError, match="count='rounds'; allowed: iterations or evaluations"):
        solver_for(True, "rounds")
