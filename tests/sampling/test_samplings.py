"""Samplings: what `sample` draws, the closed forms against every outcome, and what is refused."""

import math
from collections import Counter
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.sampling import clustering, samplings
from tests.sampling.samplings_cases import GOLDENS, centred

PARTS = [[0, 3], [4], [2, 5, 1]]  # unequal, and out of order
PAIRS = [[0, 3], [4, 1], [2, 5]]
SAMPLINGS = {
    "full": samplings.full(6),
    "nonuniform": samplings.nonuniform([0.1, 0.3, 0.05, 0.25, 0.2, 0.1]),
    "importance": samplings.importance([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "nice 1": samplings.nice(6, 1),
    "nice 4": samplings.nice(6, 4),
    "block": samplings.block(PARTS),
    "block q": samplings.block(PARTS, [0.5, 0.2, 0.3]),
    "stratified": samplings.stratified(PARTS),
    "stratified 1 of 3": samplings.stratified_of(PARTS, 1),
    "stratified 2 of 3": samplings.stratified_of(PARTS, 2),
    "block 1 of one": samplings.block_of(PARTS, 1),
    "block 2 of one": samplings.block_of([[0, 3, 4], [1, 2, 5]], 2),
}
each = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


def enumerated(sampling, mu, a):
    """mu_AS and sigma^2_AS by their definition (L2090)"""
    weights = 1 / (sampling.n * sampling.probabilities)
    cohort = [(chance, list(ids)) for chance, ids in sampling.outcomes()]
    least = min(np.sum(weights[ids] * mu[ids]) for _, ids in cohort)
    return least, sum(chance * np.sum((weights[ids] @ a[ids]) ** 2) for chance, ids in cohort)


@st.composite
def any_sampling(draw):
    n = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order, cuts = rng.permutation(n), rng.random(n - 1) < 0.4
    parts = np.split(order, np.flatnonzero(cuts) + 1)
    sizes = [len(part) for part in parts]
    kind = draw(st.sampled_from(["full", "nonuniform", "importance", "nice", "block", "SS", "SS of", "BS of"]))
    make = {
        "full": lambda: samplings.full(n),
        "nonuniform": lambda: samplings.nonuniform(rng.dirichlet(np.ones(n)) * 0.9 + 0.1 / n),
        "importance": lambda: samplings.importance(rng.uniform(0.1, 2.0, n)),
        "nice": lambda: samplings.nice(n, int(rng.integers(1, n + 1))),
        "block": lambda: samplings.block(parts, rng.dirichlet(np.ones(len(parts))) * 0.9 + 0.1 / len(parts)),
        "SS": lambda: samplings.stratified(parts),
        "SS of": lambda: samplings.stratified_of(parts, int(rng.integers(1, len(parts) + 1))),
        "BS of": lambda: samplings.block_of(parts, int(rng.integers(1, min(sizes) + 1))),
    }
    return make[kind](), rng.uniform(0.1, 3.0, n), centred(rng.standard_normal((n, 3)))


def check(sampling, mu, a):
    n, outcomes = sampling.n, list(sampling.outcomes())
    assert sum(chance for chance, _ in outcomes) == pytest.approx(1)
    assert len({ids for _, ids in outcomes}) == len(outcomes) and all(
        0 < len(ids) <= sampling.size for _, ids in outcomes
    )
    assert all(list(ids) == sorted(set(ids)) for _, ids in outcomes)
    chances, shares = np.zeros(n), np.zeros(n)
    for chance, ids in outcomes:
        chances[list(ids)] += chance
        shares[list(ids)] += chance / len(ids)
    np.testing.assert_allclose(sampling.probabilities, chances, rtol=1e-12)
    np.testing.assert_allclose(sampling.shares, shares, rtol=1e-12)
    least, square = enumerated(sampling, mu, a)
    assert sampling.mu(mu) == pytest.approx(least, rel=1e-12)
    assert sampling.variance(a) == pytest.approx(square, rel=1e-11, abs=1e-14)


@given(any_sampling())
def test_closed_forms_are_what_enumeration_gives(case):
    """P6, P7: p_i, shares, mu_AS, sigma^2_AS of any sampling"""
    check(*case)


@each
def test_closed_forms_of_each_sampling(sampling):
    rng = np.random.default_rng(0)
    for _ in range(3):
        check(sampling, rng.uniform(0.1, 3.0, 6), centred(rng.standard_normal((6, 2))))


@each
def test_expected_smoothness_is_what_enumeration_gives(sampling):
    """max_i E [L_S | i in S], L_S = sum_{j in S} L_j / (n p_j) (Gower et al. 2019)"""
    L = np.random.default_rng(3).uniform(0.1, 3.0, 6)
    given = np.zeros(6)
    for chance, ids in sampling.outcomes():
        members = list(ids)
        given[members] += chance * np.sum((L / (6 * sampling.probabilities))[members])
    assert sampling.smoothness(L) == pytest.approx(np.max(given / sampling.probabilities), rel=1e-12)
    with pytest.raises(ValueError, match="L_i has shape"):
        sampling.smoothness(L[:-1])


@each
def test_a_cohort_is_unbiased(sampling):
    """T35 (L2044): E f_S = f, with f_i arbitrary numbers"""
    values = np.random.default_rng(1).standard_normal(6)
    weights = 1 / (6 * sampling.probabilities)
    mean = sum(chance * np.sum((weights * values)[list(ids)]) for chance, ids in sampling.outcomes())
    assert mean == pytest.approx(values.mean(), rel=1e-12)


@each
def test_draws_are_as_frequent_as_the_outcomes_say(sampling):
    draws = 6000
    ids, weights, mask = jax.jit(jax.vmap(sampling.sample))(jax.random.split(jax.random.key(3), draws))
    assert ids.shape == weights.shape == mask.shape == (draws, sampling.size)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float64 and mask.dtype == bool
    ids, weights, mask = map(np.asarray, (ids, weights, mask))
    np.testing.assert_allclose(weights, np.where(mask, 1 / (6 * sampling.probabilities[ids]), 0.0), rtol=1e-15)
    drawn = Counter()
    for row, used in zip(ids, mask, strict=True):
        members = row[used].tolist()
        assert len(set(members)) == len(members) and set(row) == set(members)  # an unused slot repeats a member
        drawn[tuple(sorted(members))] += 1
    expected = {ids: chance * draws for chance, ids in sampling.outcomes()}
    assert set(drawn) <= set(expected)
    chi2, freedom = sum((drawn[ids] - mean) ** 2 / mean for ids, mean in expected.items()), len(expected) - 1
    assert chi2 <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("name", ["nonuniform", "block", "block 2 of one"])
def test_one_key_gives_one_cohort_with_jit_and_without(name):
    jitted_sample = jax.jit(SAMPLINGS[name].sample)
    for seed in range(3):
        key = jax.random.key(seed)
        plain, jitted = SAMPLINGS[name].sample(key), jitted_sample(key)
        assert all(np.array_equal(a, b) for a, b in zip(plain, jitted, strict=True))


def test_goldens():
    golden = GOLDENS["sppm_constants"]
    mu, a = np.array(golden["mu"]), np.array(golden["grad_at_star"])
    made = {
        "FS": samplings.full(4),
        "NICE1": samplings.nice(4, 1),
        "NICE2": samplings.nice(4, 2),
        "NICE3": samplings.nice(4, 3),
        "NS[.4,.3,.2,.1]": samplings.nonuniform([0.4, 0.3, 0.2, 0.1]),
        "IS": samplings.importance(mu),
        "BS{01}{23} q=[.25,.75]": samplings.block([[0, 1], [2, 3]], [0.25, 0.75]),
        "SS{01}{23}": samplings.stratified([[0, 1], [2, 3]]),
        "SS{0}{123}": samplings.stratified([[0], [1, 2, 3]]),
        "SS 1 of 2 clusters {01}{23}": samplings.stratified_of([[0, 1], [2, 3]], 1),
    }
    assert made.keys() == golden["samplings"].keys()
    for name, row in golden["samplings"].items():
        np.testing.assert_allclose(made[name].probabilities, row["p"], rtol=1e-12)
        assert made[name].mu(mu) == pytest.approx(row["mu_AS"], rel=1e-12)
        assert made[name].variance(a) == pytest.approx(row["sigma2"], rel=1e-12, abs=1e-15)


def test_samplings_say_their_name():
    names = [sampling.name for sampling in SAMPLINGS.values()]
    assert names[:4] == ["full", "nonuniform", "importance", "nice(1)"] and names[7] == "stratified(3)"
    assert len(set(names)) == len(names) - 1  # the two block samplings differ in q only
    assert [s.size for s in SAMPLINGS.values()] == [6, 1, 1, 1, 4, 3, 3, 3, 1, 2, 1, 2]


def test_c_of_q_is_the_plain_sampling_at_its_end_and_not_before():
    """P7"""
    rng = np.random.default_rng(5)
    mu, a = rng.uniform(0.1, 2.0, 6), centred(rng.standard_normal((6, 2)))
    for one, other in [
        (samplings.stratified_of(PAIRS, 3), samplings.stratified(PAIRS)),
        (samplings.block_of(PAIRS, 2), samplings.block(PAIRS)),
        (samplings.stratified_of([range(6)], 1), samplings.nice(6, 1)),
        (samplings.block_of([range(6)], 4), samplings.nice(6, 4)),
        (samplings.stratified_of([[i] for i in range(6)], 4), samplings.nice(6, 4)),
    ]:
        np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-12)
        assert one.mu(mu) == pytest.approx(other.mu(mu)) and one.variance(a) == pytest.approx(other.variance(a))
    assert samplings.stratified_of(PAIRS, 2).variance(a) > samplings.stratified(PAIRS).variance(a)
    assert samplings.block_of(PAIRS, 1).variance(a) > samplings.block(PAIRS).variance(a)


def test_weights_need_not_add_up_to_1():
    """P3"""
    sums = {
        round(float(sum(1 / (6 * SAMPLINGS["block"].probabilities[list(ids)]))), 6)
        for _, ids in SAMPLINGS["block"].outcomes()
    }
    assert sums == {0.5, 1.0, 1.5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplings.nonuniform([0.5, 0.0, 0.5]), r"p=\[0.5, 0.0, 0.5\]; allowed: a positive probability"),
        (lambda: samplings.nonuniform([0.5, math.nan]), r"p=.*allowed: a positive"),
        (lambda: samplings.nonuniform([]), r"p=\[\]; allowed"),
        (lambda: samplings.nonuniform([0.5, 0.4]), r"p adds up to 0.9; allowed: 1"),
        (lambda: samplings.nonuniform([0.5, 0.5, math.inf]), r"p adds up to inf"),
        (lambda: samplings.importance([1.0, -1.0]), r"mu=\[1.0, -1.0\]; allowed: a finite positive"),
        (lambda: samplings.importance([1.0, math.inf]), r"mu=.*; allowed: a finite positive"),
        (lambda: samplings.full(0), r"n=0; allowed: 1 to"),
        (lambda: samplings.nice(4, 0), r"tau=0; allowed: 1 to 4, .*may not be empty"),
        (lambda: samplings.nice(4, 5), r"tau=5; allowed: 1 to 4"),
        (lambda: samplings.block([]), r"clusters is empty.*; allowed: at least one"),
        (lambda: samplings.stratified([]), r"clusters is empty"),
        (lambda: samplings.stratified([[0, 1], []]), r"clusters\[1\] is empty, so that a cohort could be"),
        (lambda: samplings.block([[0, 1], [1, 2]]), r"do not partition range\(3\): client 1 is in 2 of them"),
        (lambda: samplings.block([[0, 1], [3]]), r"do not partition range\(4\): client 2 is in 0 of them"),
        (lambda: samplings.block([[0, -1]]), r"clusters=.*allowed: lists of client numbers >= 0"),
        (lambda: samplings.block([[0.0, 1.0]]), r"clusters=.*allowed: lists of client numbers >= 0"),
        (lambda: samplings.block([[0], [1]], [1.0]), r"q has 1 entries; allowed: one for each of the 2 clusters"),
        (lambda: samplings.block([[0], [1]], [1.0, 0.0]), r"q=\[1.0, 0.0\]; allowed: a positive"),
        (lambda: samplings.stratified_of(PARTS, 4), r"c=4; allowed: 1 to 3, the number of clusters"),
        (lambda: samplings.stratified_of(PARTS, 0), r"c=0; allowed: 1 to 3"),
        (lambda: samplings.block_of(PARTS, 2), r"c=2; allowed: 1 to 1, the smallest cluster"),
        (lambda: samplings.nice(3, 1).mu(np.ones(2)), r"mu has shape \(2,\).*allowed: n=3"),
        (
            lambda: samplings.nice(3, 1).mu(np.array([1.0, -1.0, 1.0])),
            r"mu has shape .*allowed: n=3 finite numbers >= 0",
        ),
        (lambda: samplings.nice(3, 1).variance(np.zeros((2, 1))), r"gradients has shape \(2, 1\); allowed: n=3"),
        (lambda: samplings.nice(2, 1).variance(np.full((2, 1), np.nan)), r"gradients has shape .*finite rows"),
        (lambda: samplings.full(2).variance(np.ones((2, 1))), r"mean of norm 1 .*centre them"),
        (
            lambda: clustering.by_gradients(np.ones((3, 1)), 2),
            r"b=2 clusters of 3 clients; allowed: 1 to 1, the distinct",
        ),
        (lambda: clustering.by_gradients(np.ones((3, 1)), 0), r"b=0 clusters"),
        (lambda: clustering.by_features(np.ones((3, 1)), [[0, 1], []], 1), r"rows\[1\] is empty"),
        (
            lambda: clustering.optimal_stratified(np.ones((5, 1)), 2),
            r"b=2 clusters of n=5 clients; allowed: b that divides n",
        ),
        (
            lambda: clustering.optimal_stratified(np.ones((16, 1)), 4),
            r"n=16 clients have 2627625 partitions .* at most 200000",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradients_with_rounding_are_accepted():
    a = centred(np.random.default_rng(6).standard_normal((4, 2)))
    sampling = samplings.nice(4, 2)
    assert sampling.variance(a + 1e-7) == pytest.approx(sampling.variance(a), rel=1e-5)
    assert samplings.full(1).variance(np.full((1, 2), 1e-9)) == 0.0
    with pytest.raises(ValueError, match="centre them"):
        sampling.variance(a + 1e-3)


def test_probabilities_in_float32_are_accepted_and_made_to_add_up_to_1():
    p = np.full(7, 1 / 7, np.float32)
    assert samplings.nonuniform(p).probabilities.sum() == pytest.approx(1, rel=1e-15)
    with pytest.raises(ValueError, match="adds up to"):
        samplings.nonuniform(p * np.float32(1.001))


def test_a_hundred_clients_in_ten_clusters_draw_ten():
    """The thesis's setting (L4860): shapes, members, weights 1/10"""
    clusters = np.arange(100).reshape(10, 10)
    for make, alone in product((samplings.stratified, samplings.block), range(3)):
        draw = make(clusters).sample(jax.random.key(alone))
        np.testing.assert_allclose(draw.weights, 0.1, rtol=1e-12)
        assert draw.mask.all() and len(set(np.asarray(draw.ids) // 10)) == (10 if make is samplings.stratified else 1)


def test_numbers_of_clients_are_whole():
    for make in (
        lambda: samplings.nice(4, 2.5),
        lambda: samplings.stratified_of([[0], [1]], 1.5),
        lambda: samplings.nice(4, 2.0),
    ):  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match=r"[12]\.[05]"):  # under the tests the type checker is first
            make()


def test_lists_will_do_for_the_clients_numbers():
    sampling = samplings.nice(4, 2)
    assert sampling.mu([1.0, 2.0, 3.0, 4.0]) == sampling.mu(np.array([1.0, 2.0, 3.0, 4.0]))
    assert sampling.variance([[1.0], [-1.0], [2.0], [-2.0]]) == sampling.variance(
        np.array([[1.0], [-1.0], [2.0], [-2.0]])
    )
    assert sampling.smoothness([1.0, 2.0, 3.0, 4.0]) == sampling.smoothness(np.array([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ValueError, match=r"gradients has shape \(4,\); allowed: n=4 finite rows"):
        sampling.variance([1.0, -1.0, 2.0, -2.0])
