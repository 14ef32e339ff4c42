"""The recommender: what it promises is kept on quadratics, and it refuses what cannot be had."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import clustering, runner
from commjax.algorithms import sppm_as
from commjax.problems import quadratic
from commjax.recommend import Facts, local_rounds, recommend, solver_for

N, D = 6, 3
PROBLEM = quadratic.random(1, N, D, mu=1.0, L=4.0)
OPTIMUM = quadratic.optimum(PROBLEM).params
START = OPTIMUM + 3.0
FACTS = Facts(
    mu_i=np.linalg.eigvalsh(PROBLEM.H)[:, 0], L_i=np.linalg.eigvalsh(PROBLEM.H)[:, -1],
    gradients=np.einsum("nij,nj->ni", PROBLEM.H, OPTIMUM - PROBLEM.c), distance2=27.0,
    clusters=clustering.optimal_stratified(np.einsum("nij,nj->ni", PROBLEM.H, OPTIMUM - PROBLEM.c), 3),
)  # fmt: skip


@pytest.mark.parametrize("epsilon", [1.0, 0.1])
def test_what_is_recommended_reaches_epsilon_on_average(epsilon):
    found = recommend(FACTS, epsilon)
    algorithm = sppm_as.sppm_as(quadratic.loss, found.sampling, found.solver)
    state = algorithm.init(jnp.asarray(START), jnp.arange(N))
    data = jax.tree.map(jnp.asarray, PROBLEM)
    settings = runner.stack([sppm_as.HParams(found.gamma, found.K, 0.0)])
    states, _ = runner.sweep(jax.random.split(jax.random.key(0), 40), algorithm, settings, state, data, found.T)
    distance = np.sum((np.asarray(states.server.params[0]) - OPTIMUM) ** 2, axis=1)
    assert distance.mean() <= epsilon
    assert found.neighbourhood < epsilon and found.cost == found.K * found.T


def test_dearer_global_rounds_are_used_less():
    flat, hubs = recommend(FACTS, 0.1, 1.0, 0.0), recommend(FACTS, 0.1, 0.05, 1.0)
    assert hubs.T <= flat.T and hubs.gamma >= flat.gamma and hubs.K >= flat.K
    assert hubs.cost == pytest.approx((0.05 * hubs.K + 1) * hubs.T)


def test_more_accuracy_costs_more_and_stratified_sampling_is_chosen():
    loose, tight = recommend(FACTS, 1.0), recommend(FACTS, 0.05)
    assert tight.cost > loose.cost and tight.gamma < loose.gamma
    assert tight.sampling.name.startswith("stratified")


def test_the_number_of_local_rounds_grows_with_gamma_and_accuracy():
    rounds = [local_rounds(gamma, 0.1, 10.0, 1e-6, 1.0) for gamma in (0.01, 1.0, 100.0)]
    assert rounds == sorted(rounds) and local_rounds(1.0, 0.1, 10.0, 1e-12, 1.0) > rounds[1]


def test_local_rounds_are_the_first_at_which_nesterovs_bound_is_below_the_error():
    """kappa = 8 / 2: (kappa + 1) distance^2 exp(-K / sqrt(kappa)) <= error^2."""
    assert 5 * 3 * math.exp(-20 / 2) <= 1e-3 < 5 * 3 * math.exp(-19 / 2)
    assert local_rounds(1.0, 1.0, 7.0, error2=1e-3, distance2=3.0) == 20
    assert local_rounds(1.0, 1.0, 1.0, error2=1.0, distance2=0.5) == 1  # one condition, and near already


def test_the_number_of_global_rounds_is_the_first_at_which_the_bound_is_below_epsilon():
    found = recommend(FACTS._replace(gradients=0 * FACTS.gradients), 0.1, gammas=[0.05])
    factor = 1 + 0.05 * found.sampling.mu(FACTS.mu_i)  # rate^-1 / (1 + s), where s = gamma mu because sigma^2 = 0
    before, after = (27.0 / factor**t + found.neighbourhood for t in (found.T - 1, found.T))
    assert before > 0.1 >= after


def test_bad_wishes_are_refused():
    with pytest.raises(ValueError, match=r"epsilon=0\.0; allowed: positive"):
        recommend(FACTS, 0.0)
    with pytest.raises(ValueError, match="not both 0"):
        recommend(FACTS, 0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match="allowed: above"):
        recommend(FACTS, 1e-3, gammas=[10.0])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"distance2": float("nan")}, "distance2=nan; allowed: finite"),
        ({"distance2": -5.0}, "distance2=-5.0; allowed"),
        ({"L_i": np.full(N, np.nan)}, "L_i=.*; allowed: n=6 finite positive"),
        ({"L_i": np.full(N, 0.1)}, "allowed: mu_i <= L_i"),
        ({"mu_i": np.zeros(N)}, "mu_i=.*; allowed"),
        ({"gradients": np.full((N, D), np.inf)}, "gradients has shape"),
    ],
)
def test_facts_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        recommend(FACTS._replace(**change), 0.1)


def test_strong_convexity_lost_in_rounding_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="mu_i far enough from 0"):
        recommend(FACTS._replace(mu_i=np.full(N, 1e-30), gradients=0 * FACTS.gradients), 0.1, gammas=[1.0])


def test_the_solver_follows_from_what_a_local_round_is():
    by = {count: recommend(FACTS, 0.1, count=count) for count in ("iterations", "evaluations")}
    assert by["iterations"].solver_name == "cg" and by["evaluations"].solver_name == "lbfgs"
    assert by["evaluations"].evaluations <= by["iterations"].evaluations
    cg, lbfgs = by["iterations"], by["evaluations"]
    assert (cg.evaluations, lbfgs.evaluations) == ((2 * cg.K + 1) * cg.T, (lbfgs.K + 2) * lbfgs.T)
    assert solver_for(False).name == "adam"
    with pytest.raises(ValueError, match="count='rounds'; allowed: iterations or evaluations"):
        recommend(FACTS, 0.1, count="rounds")


def test_a_block_of_another_size_than_the_other_cohorts_is_not_compared_with_them():
    """Its rounds would look cheap: the cost does not count who takes part."""
    pairs = FACTS._replace(clusters=[np.arange(3), np.arange(3, 6)])
    for c1, c2 in ((1.0, 0.0), (0.05, 1.0)):
        assert recommend(pairs, 1.0, c1, c2).sampling.size == 2
