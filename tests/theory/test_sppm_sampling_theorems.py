"""SPPM-AS's theorems on samplings, T37-T42: nice, block and stratified sampling over every clustering, and
counterexamples."""

from itertools import combinations

import numpy as np
import pytest

from commjax.sampling import clustering, samplings
from commjax.theory import sppm
from tests.theory.sppm_cases import GAMMAS, GOLDENS, MU, STAR, N, centred, gradients_at, squares


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_nice_sampling_improves_with_its_size(n):
    """T37 (L5411, P9)"""
    rng = np.random.default_rng(n)
    mu, a = rng.uniform(0.1, 2.0, n), centred(rng.standard_normal((n, 3)))
    chain = [samplings.nice(n, tau) for tau in range(1, n + 1)]
    mus, variances = [s.mu(mu) for s in chain], [s.variance(a) for s in chain]
    assert np.all(np.diff(mus) >= 0) and np.all(np.diff(variances) < 0)
    assert mus[0] == pytest.approx(mu.min()) and mus[-1] == pytest.approx(mu.mean())
    assert variances[0] == pytest.approx(squares(a).mean()) and variances[-1] == 0
    for tau, value in enumerate(variances, 1):
        sets = [squares(a[list(ids)].mean(axis=0)) for ids in combinations(range(n), tau)]
        assert value == pytest.approx(np.mean(sets), abs=1e-14)
        assert value == pytest.approx(sppm.nice_variance(n, tau, variances[0]))
        assert value <= variances[0] / tau + 1e-15


def test_block_and_stratified_sampling_at_their_extremes():
    """T38 (L2155, L2177)"""
    a, p = gradients_at(STAR), np.array([0.4, 0.3, 0.2, 0.1])
    singles, whole = [[i] for i in range(N)], [list(range(N))]
    for one, other in [
        (samplings.block(whole), samplings.full(N)),
        (samplings.block(singles, p), samplings.nonuniform(p)),
        (samplings.stratified(whole), samplings.nice(N, 1)),
        (samplings.stratified(singles), samplings.full(N)),
    ]:
        assert one.mu(MU) == pytest.approx(other.mu(MU), rel=1e-12)
        assert one.variance(a) == pytest.approx(other.variance(a), rel=1e-12, abs=1e-14)
        assert dict((ids, q) for q, ids in one.outcomes()) == pytest.approx({ids: q for q, ids in other.outcomes()})


def test_importance_sampling_has_the_largest_mu_of_one_client_samplings():
    """L4736"""
    best = samplings.importance(MU).mu(MU)
    assert best == pytest.approx(MU.mean())
    for p in np.random.default_rng(8).dirichlet(np.ones(N), 50):
        assert samplings.nonuniform(p).mu(MU) <= best * (1 + 1e-12)


def test_the_variance_lemma_holds_and_is_loose():
    """T39 (L2165, P6)"""
    rng = np.random.default_rng(9)
    ratios = []
    for _ in range(100):
        clusters = np.split(rng.permutation(7), np.sort(rng.choice(np.arange(1, 7), 2, replace=False)))
        a = centred(rng.standard_normal((7, 2)))
        first, second = sppm.stratified_upper_bounds(a, clusters)
        exact = samplings.stratified(clusters).variance(a)
        assert exact <= first * (1 + 1e-12) <= second * (1 + 2e-12)
        ratios.append(first / exact)
    assert min(ratios) >= 3 * (1 - 1e-12)  # b = 3: the Lemma always loses the factor b, and max instead of mean
    pairs = np.array([[1.0], [3.0], [-2.0], [-2.0]])  # equal distances from each mean: exactly b
    assert sppm.stratified_upper_bounds(pairs, [[0, 1], [2, 3]])[0] == pytest.approx(
        2 * samplings.stratified([[0, 1], [2, 3]]).variance(pairs)
    )


def every_clustering(left, m):
    """All partitions of the tuple `left` into sets of m"""
    if not left:
        yield []
    for others in combinations(left[1:], m - 1) if left else ():
        rest = tuple(i for i in left if i not in (left[0], *others))
        yield from ([[left[0], *others], *more] for more in every_clustering(rest, m))


@pytest.mark.parametrize(("b", "m", "count"), [(2, 2, 3), (3, 3, 280), (3, 2, 15), (2, 3, 10), (4, 1, 1)])
def test_on_the_best_clusters_stratified_beats_nice_which_beats_block(b, m, count):
    """T40 (L2186), T42 (L5620) and, for every b >= m, the question of L5638 (P10): all equal clusterings"""
    rng = np.random.default_rng(b)
    for seed in range(1 if count > 100 else 4):
        a, mu = centred(rng.standard_normal((b * m, 2)) + seed), rng.uniform(0.1, 2.0, b * m)
        T = squares(a).mean()
        clusterings = list(every_clustering(tuple(range(b * m)), m))
        assert len(clusterings) == count
        # Closed forms of P6; a sampling is built for some of the clusterings only, because under type checks that is
        # slow.
        sums = np.array([[a[ids].sum(axis=0) for ids in clusters] for clusters in clusterings])
        BS = np.sum(sums**2, axis=(1, 2)) * b / (b * m) ** 2
        spread = [[m * squares(a[ids] - a[ids].mean(axis=0)).sum() for ids in clusters] for clusters in clusterings]
        SS = np.sum(spread, axis=1) / (b * m) ** 2
        some = slice(None, None, max(1, count // 4)) if seed == 0 else slice(0)
        for clusters, ours, theirs in zip(clusterings[some], SS[some], BS[some]):
            assert samplings.stratified(clusters).variance(a) == pytest.approx(ours, abs=1e-13)
            assert samplings.block(clusters).variance(a) == pytest.approx(theirs, abs=1e-13)
        np.testing.assert_allclose([sppm.stratified_from_block(v, T, b) for v in BS], SS, atol=1e-13)
        nice = samplings.nice(b * m, b)
        most, least = sppm.optimal_clustering_bounds(T, b, m)
        assert most == pytest.approx(nice.variance(a)) and most == pytest.approx(SS.mean())
        assert least == pytest.approx(BS.mean(), abs=1e-13)
        best = clustering.optimal_stratified(a, b)
        stratified, block = samplings.stratified(best), samplings.block(best)
        assert stratified.variance(a) == pytest.approx(SS.min(), abs=1e-13)
        assert stratified.variance(a) <= most * (1 + 1e-12) and block.variance(a) >= least * (1 - 1e-12)
        if m <= b:
            assert most <= least * (1 + 1e-12)
        assert stratified.mu(mu) >= nice.mu(mu) * (1 - 1e-12)
        for gamma in GAMMAS:
            ours, theirs = (sppm.neighbourhood(gamma, s.mu(mu), s.variance(a)) for s in (stratified, nice))
            assert ours <= theirs * (1 + 1e-12)


def test_with_clusters_larger_than_their_number_block_sampling_can_win_on_the_best_clusters():
    """P10 needs m <= b: for the corners of a simplex all clusterings are alike, and SS = 2 BS at b = 2, m = 3"""
    a = centred(np.eye(6))
    best, T = clustering.optimal_stratified(a, 2), squares(a).mean()
    assert samplings.stratified(best).variance(a) == pytest.approx(0.4 * T)
    assert samplings.block(best).variance(a) == pytest.approx(0.2 * T)
    np.testing.assert_allclose(sppm.optimal_clustering_bounds(float(T), 2, 3), [0.4 * T, 0.2 * T])


def test_the_text_example():
    """T41 (L5566), and block sampling at 0 on the same clusters"""
    golden = GOLDENS["sppm_text_example"]
    a, clusters = np.array(golden["a"]), golden["clusters"]
    assert samplings.stratified(clusters).variance(a) == pytest.approx(golden["SS"])
    assert samplings.nice(4, 2).variance(a) == pytest.approx(golden["NICE_tau2"])
    assert samplings.block(clusters).variance(a) == pytest.approx(golden["BS_same"], abs=1e-15)
    assert samplings.stratified(golden["best"]).variance(a) == pytest.approx(golden["SS_best_clustering"])
    assert samplings.block(golden["best"]).variance(a) == pytest.approx(golden["BS_best"])


def test_roots_of_unity_make_block_sampling_exact_with_the_exponent_b_j_plus_i():
    """P9 (L5548): with the printed m j + i it fails at b = 3, m = 2"""
    b, m = 3, 2
    clusters = np.arange(b * m).reshape(b, m)

    def variance(step):
        power = np.array([step * j + i for i in range(b) for j in range(m)]) * 2 * np.pi / (b * m)
        return samplings.block(clusters).variance(centred(np.stack([np.cos(power), np.sin(power)], axis=1)))

    assert variance(b) == pytest.approx(0, abs=1e-15) and variance(m) > 0.01
