"""Scafflix refuses shifts, hyperparameters, constants and cohorts that its theorems do not allow."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import scafflix
from tests.algorithms.scafflix_cases import (
    ALPHA,
    DATA,
    IDS,
    KEY,
    MU,
    OPTIMUM,
    START,
    D,
    L,
    N,
    begin,
    made,
    value_and_grad,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations, scafflix.i_scaffnew])
def test_a_shift_that_breaks_the_invariant_is_refused(make):
    algorithm = make(value_and_grad)
    optimum = {} if make is scafflix.i_scaffnew else {"optimum": OPTIMUM}
    ones = jnp.ones((N, D))
    with pytest.raises(ValueError, match=r"shift: sum_i alpha_i h_i must be 0 and is .* allowed: zeros"):
        algorithm.init(START, IDS, shift=ones, alpha=ALPHA, **optimum)
    with pytest.raises(ValueError, match="must be 0"):
        algorithm.init(START, IDS, shift=ones.at[0, 0].set(jnp.nan), alpha=1.0, **optimum)
    sums_to_0 = ones.at[N // 2 :].set(-1.0)
    algorithm.init(START, IDS, shift=sums_to_0, alpha=1.0, **optimum)
    with pytest.raises(ValueError, match=r"is 1\.25 in some"):
        algorithm.init(START, IDS, shift=ones.at[0].set(0.25 - N + 2), alpha=1.0, **optimum)
    off = sums_to_0.at[0, 0].add(1e-10)
    with pytest.raises(ValueError, match="must be 0"):
        algorithm.init(START, IDS, shift=off, alpha=1.0, **optimum)


def test_a_shift_without_alpha_is_refused_where_it_cannot_be_checked():
    with pytest.raises(ValueError, match="needs alpha="):
        begin(scafflix.scafflix(value_and_grad), shift=jnp.zeros((N, D)))
    with pytest.raises(ValueError, match=r"alpha=.* allowed"):
        begin(scafflix.scafflix(value_and_grad), shift=jnp.zeros((N, D)), alpha=1.5)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, [0.5, 2.0], [[0.5]], math.nan])
def test_an_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha(=| has shape).*; allowed: (0 to 1|one number)"):
        scafflix.check(scafflix.HParams(0.1, np.array(alpha), 0.5), n=2)
    with pytest.raises(ValueError, match=r"alpha=.*; allowed: one number in \[0, 1\]"):
        scafflix.theoretical(L, MU, np.array(alpha))


@pytest.mark.parametrize("p", [0.0, -0.5, 1.01, math.nan])
def test_a_p_outside_0_to_1_is_refused(p):
    with pytest.raises(ValueError, match=r"p=.*; allowed: 0 < p <= 1"):
        scafflix.check(scafflix.HParams(0.1, 0.5, p), n=2)
    with pytest.raises(ValueError, match=r"allowed: 0 < p <= 1"):
        scafflix.theoretical(L, MU, p=p)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf, math.nan, [0.1, 0.0], [[0.1]]])
def test_a_gamma_that_is_not_positive_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma(=| has shape).*; allowed: (positive and finite|one number)"):
        scafflix.check(scafflix.HParams(np.array(gamma), 0.5, 0.5), n=2)


def test_a_gamma_above_the_theorems_warns_or_is_refused_and_one_below_is_taken():
    gamma = 1 / L
    gamma[3] *= 1.5
    with pytest.warns(UserWarning, match=r"gamma_3 = .* is above 1/A_3 = .*"):
        assert scafflix.theoretical(L, MU, ALPHA, gamma=gamma).gamma.tolist() == gamma.tolist()
    with pytest.raises(ValueError, match="gamma_3"):
        scafflix.theoretical(L, MU, ALPHA, gamma=gamma, strict=True)
    below = scafflix.theoretical(L, MU, ALPHA, gamma=0.1, strict=True)
    assert below.p == pytest.approx(math.sqrt(0.1 * MU.min()))
    scafflix.theoretical(L, MU, ALPHA, gamma=1 / L, strict=True)


@pytest.mark.parametrize(
    "A, mu", [([1.0, 2.0], [0.5, 0.0]), ([1.0, -2.0], 0.1), ([1.0, 2.0], 1.5), ([1, math.nan], 0.1)]
)
def test_constants_that_no_function_has_are_refused(A, mu):
    with pytest.raises(ValueError, match="allowed: 0 < mu_i <= A_i"):
        scafflix.theoretical(np.array(A), np.array(mu))


def test_noise_and_accuracy_come_together_or_not_at_all():
    for given in ({"C": np.ones(N)}, {"epsilon": 0.1}):
        with pytest.raises(ValueError, match="allowed: both"):
            scafflix.theoretical(L, MU, **given)
    for epsilon in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            scafflix.theoretical(L, MU, C=np.ones(N), epsilon=epsilon)


def test_a_missing_or_misshapen_optimum_is_refused():
    algorithm = scafflix.scafflix(value_and_grad)
    with pytest.raises(ValueError, match="init needs optimum="):
        algorithm.init(START, IDS)
    for wrong in (OPTIMUM[:-1], OPTIMUM[:, :-1], OPTIMUM[0], {"x": OPTIMUM}):
        with pytest.raises(ValueError, match="optimum must have one row"):
            algorithm.init(START, IDS, optimum=wrong)


def test_a_misshapen_shift_is_refused():
    zeros = jnp.zeros((N, D))
    for wrong in (zeros[:-1], zeros[:, :-1], zeros[0], {"x": zeros}):
        with pytest.raises(ValueError, match=f"shift must have one row of the params for each of {N} clients"):
            begin(made(scafflix.scafflix), shift=wrong, alpha=ALPHA)


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations])
def test_a_cohort_of_nobody_or_of_more_than_all_is_refused(make):
    for cohort in (0, -1):
        with pytest.raises(ValueError, match=f"cohort must be at least 1 client .*, got {cohort}"):
            make(value_and_grad, cohort=cohort)
    algorithm = make(value_and_grad, cohort=N + 1)
    with pytest.raises(ValueError, match=f"between 1 and the number of clients, got {N + 1} of {N}"):
        algorithm.step(KEY, scafflix.HParams(0.1, 0.5, 0.5), begin(algorithm), DATA)
