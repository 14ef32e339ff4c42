"""SPPM-AS's theorems, T30-T45: exact expectations over every cohort, with exact proxes of quadratics, and counterexamples."""

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from commjax.problems import quadratic
from commjax.sampling import clustering, samplings
from commjax.theory import sppm

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens_sppm.json").read_text())
N, D = 4, 3
PROBLEM = quadratic.random(0, N, D, mu=0.3, L=3.0)
MU = np.linalg.eigvalsh(PROBLEM.H)[:, 0]
STAR = quadratic.optimum(PROBLEM).params
GAMMAS = 10.0 ** np.arange(-2, 4)
SAMPLINGS = [
    samplings.full(N),
    samplings.nonuniform([0.4, 0.3, 0.2, 0.1]),
    samplings.importance(MU),
    samplings.nice(N, 1),
    samplings.nice(N, 2),
    samplings.nice(N, 3),
    samplings.block([[0, 1], [2, 3]], [0.25, 0.75]),
    samplings.block([[0], [1, 2, 3]]),
    samplings.stratified([[0, 1], [2, 3]]),
    samplings.stratified([[0], [1, 2, 3]]),
    samplings.stratified_of([[0], [1, 2], [3]], 2),
    samplings.block_of([[0, 2], [1, 3]], 1),
]
each = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.name)


def gradients_at(x, problem=PROBLEM):
    return np.einsum("nij,nj->ni", problem.H, x - problem.c)


def centred(rows):
    return rows - rows.mean(axis=0)


def prox(gamma, weights, y, problem=PROBLEM):
    """argmin_x sum_i w_i f_i(x) + |x - y|^2/(2 gamma) for rows y"""
    H = np.einsum("n,nij->ij", weights, problem.H)
    right = np.einsum("n,nij,nj->i", weights, *problem)
    return np.linalg.solve(np.eye(H.shape[0]) + gamma * H, (y + gamma * right).T).T


def cohort_weights(sampling, ids):
    weights = np.zeros(sampling.n)
    weights[list(ids)] = 1 / (sampling.n * sampling.probabilities[list(ids)])
    return weights


def starts(count=30, star=STAR, seed=1):
    """Points at distances 1e-6 to 1e3 from x*, and x*"""
    rng = np.random.default_rng(seed)
    away = rng.standard_normal((count, len(star))) * 10.0 ** rng.uniform(-6, 3, (count, 1))
    away[0] = 0
    return star + away


def squares(rows):
    return np.sum(rows**2, axis=-1)


def one(d=D):
    """A client with a random strongly convex quadratic: H, c, mu"""
    problem = quadratic.random(7, 1, d, mu=0.4, L=5.0)
    return problem, 0.4


@pytest.mark.parametrize("gamma", GAMMAS)
def test_every_point_is_a_fixed_point_and_the_prox_contracts(gamma):
    """T30 (L5170), T31 (L5190)"""
    problem, mu = one()
    x, y = np.random.default_rng(2).standard_normal((2, 20, D)) * 5
    gradient = (x - problem.c[0]) @ problem.H[0]
    np.testing.assert_allclose(prox(gamma, np.ones(1), x + gamma * gradient, problem), x, rtol=1e-9, atol=1e-9)
    shrunk = squares(prox(gamma, np.ones(1), x, problem) - prox(gamma, np.ones(1), y, problem))
    assert np.all(shrunk <= sppm.rate(gamma, mu) * squares(x - y) * (1 + 1e-9))
    flat = np.linalg.eigh(problem.H[0])[1][:, 0]  # along the flattest direction it is an equality
    moved = prox(gamma, np.ones(1), np.stack([x[0], x[0] + flat]), problem)
    np.testing.assert_allclose(squares(moved[1] - moved[0]), sppm.rate(gamma, mu), rtol=1e-7)


def scalar_prox(gamma, mu, y):
    """Of log cosh x + mu/2 x^2, by bisection of its monotone equation"""
    low, high = np.minimum(y, 0) - 1.0, np.maximum(y, 0) + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        above = gamma * (np.tanh(middle) + mu * middle) + middle - y > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return middle


def test_the_facts_about_the_prox_hold_for_a_function_that_is_not_quadratic():
    mu, x = 0.2, np.linspace(-5, 5, 41)
    for gamma in (0.1, 1.0, 30.0):
        np.testing.assert_allclose(scalar_prox(gamma, mu, x + gamma * (np.tanh(x) + mu * x)), x, atol=1e-11)
        moved = np.abs(np.subtract.outer(*(2 * [scalar_prox(gamma, mu, x)])))
        assert np.all(moved**2 <= sppm.rate(gamma, mu) * np.subtract.outer(x, x) ** 2 + 1e-12)
        point = x + 0.3  # T45's certificate, at points that are not the prox
        residual = np.abs(np.tanh(point) + mu * point + (point - x) / gamma)
        assert np.all((point - scalar_prox(gamma, mu, x)) ** 2 <= sppm.squared_prox_error(residual, gamma, mu) + 1e-12)


def test_a_recurrence_is_below_its_bound():
    """T32 (L5197)"""
    rng = np.random.default_rng(3)
    for _ in range(50):
        a, b, start = rng.uniform(0, 0.999), rng.uniform(0, 2), rng.uniform(0, 5)
        s = start
        for t in range(60):
            limit = sppm.recurrence(start, a, b, t)
            assert s <= limit * (1 + 1e-12) + 1e-12
            assert limit <= a**t * start + b / (1 - a) + 1e-12 and limit <= a**t * start + b * t + 1e-12
            s = a * s + b
    assert sppm.recurrence(3.0, 0.5, 1.0, 0) == 3.0 and sppm.recurrence(0.0, 0.5, 1.0, 1) == 1.0


def test_a_conic_combination_adds_up_strong_convexity():
    """T33 (L5261): at least sum_i w_i mu_i, and exactly that if the flat directions agree"""
    weights = np.random.default_rng(4).uniform(0.1, 2.0, N)
    assert np.linalg.eigvalsh(np.einsum("n,nij->ij", weights, PROBLEM.H))[0] >= weights @ MU
    agree = np.stack([np.diag([mu, 3.0]) for mu in MU])
    assert np.linalg.eigvalsh(np.einsum("n,nij->ij", weights, agree))[0] == pytest.approx(weights @ MU, rel=1e-12)


@each
def test_one_step_is_within_the_theorem_for_every_stepsize(sampling):
    """T34 (L2085)"""
    mu, sigma2 = sampling.mu(MU), sampling.variance(gradients_at(STAR))
    x, outcomes = starts(), list(sampling.outcomes())
    before = squares(x - STAR)
    for gamma in GAMMAS:
        proxes = [(chance, prox(gamma, cohort_weights(sampling, ids), x)) for chance, ids in outcomes]
        after = sum(chance * squares(point - STAR) for chance, point in proxes)
        limit = np.array([sppm.one_step(d, gamma, mu, sigma2) for d in before])
        assert np.all(after <= limit * (1 + 1e-9) + 1e-20)
        assert np.all(limit <= [sppm.bound(1, d, gamma, mu, sigma2) for d in before] + 1e-12 * limit)


def alike(mu, seed=5):
    """Clients mu/2 |x - c_i|^2 with x* = 0"""
    c = centred(np.random.default_rng(seed).standard_normal((N, D)))
    return quadratic.Quadratic(np.stack([mu * np.eye(D)] * N), c)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_theorem_is_an_equality_where_clients_differ_in_their_centres_only(gamma):
    """T34: neither the rate nor the neighbourhood can be improved, for samplings whose weights add up to 1"""
    mu, x = 0.7, starts(10, np.zeros(D))
    problem = alike(mu)
    for sampling in (
        samplings.nice(N, 2),
        samplings.stratified([[0, 1], [2, 3]]),
        samplings.stratified([[0], [1, 2, 3]]),
    ):
        sigma2 = sampling.variance(gradients_at(np.zeros(D), problem))
        assert sampling.mu(np.full(N, mu)) == pytest.approx(mu) and sigma2 > 0.01
        after = 0.0
        for chance, ids in sampling.outcomes():
            after = after + chance * squares(prox(gamma, cohort_weights(sampling, ids), x, problem))
        np.testing.assert_allclose(after, [sppm.one_step(d, gamma, mu, sigma2) for d in squares(x)], rtol=1e-9)
        limit = sppm.neighbourhood(gamma, mu, sigma2)  # the fixed point of the one-step equality
        assert sppm.one_step(limit, gamma, mu, sigma2) == pytest.approx(limit, rel=1e-12)


def test_the_bound_is_the_recurrence_unrolled():
    """T34: one step after another stays below, and comes close to it"""
    for gamma in GAMMAS:
        mu, sigma2, start = 0.4, 2.0, 9.0
        distance = start
        for t in range(40):
            limit = sppm.bound(t, start, gamma, mu, sigma2)
            assert distance <= limit * (1 + 1e-12)
            assert limit - distance == pytest.approx(
                sppm.rate(gamma, mu) ** t * sppm.neighbourhood(gamma, mu, sigma2), abs=1e-12
            )
            distance = sppm.one_step(distance, gamma, mu, sigma2)


def test_the_neighbourhood_is_bounded_by_both_of_its_limits():
    """P14 (L2108)"""
    for gamma in GAMMAS:
        value = sppm.neighbourhood(gamma, 0.3, 2.0)
        assert value <= min(2.0 / 0.09, gamma * 2.0 / 0.6) * (1 + 1e-12)
        assert value >= 0.4 * min(2.0 / 0.09, gamma * 2.0 / 0.6)
    assert sppm.neighbourhood(1 / 0.3, 0.3, 2.0) == pytest.approx(2.0 / (3 * 0.09))  # L2105
    assert sppm.neighbourhood(math.inf, 0.3, 2.0) == pytest.approx(2.0 / 0.09)
    assert sppm.neighbourhood(1e5, 0.3, 0.0) == 0.0


def test_rates_and_complexities_are_the_golden_ones():
    for row in GOLDENS["sppm_rate"]:
        gamma, mu, sigma2, epsilon = (row[name] for name in ("gamma", "mu", "sigma2", "eps"))
        assert sppm.rate(gamma, mu) == pytest.approx(row["rate"], rel=1e-12)
        assert sppm.neighbourhood(gamma, mu, sigma2) == pytest.approx(row["neighborhood"], rel=1e-12)
        assert sppm.stepsize_for(epsilon, mu, sigma2) == pytest.approx(row["gamma_eps"], rel=1e-12)
        assert sppm.iterations(epsilon, mu, sigma2, 1 / epsilon) == pytest.approx(row["T_eps"], rel=1e-12)


def test_so_many_iterations_reach_epsilon():
    """T36 (L2119), also beyond its epsilon <= sigma^2/mu^2; and the count for a stepsize of one's own"""
    rng = np.random.default_rng(6)
    tight = 0
    for _ in range(200):
        mu, sigma2, start = 10.0 ** rng.uniform(-2, 1, 3)
        epsilon = 10.0 ** rng.uniform(-4, 0.5) * sigma2 / mu**2
        gamma, T = sppm.stepsize_for(epsilon, mu, sigma2), sppm.iterations(epsilon, mu, sigma2, start)
        assert sppm.neighbourhood(gamma, mu, sigma2) <= epsilon / 2 * (1 + 1e-12)
        assert sppm.bound(math.ceil(T), start, gamma, mu, sigma2) <= epsilon * (1 + 1e-9)
        tight += T > 10 and sppm.bound(int(0.7 * T), start, gamma, mu, sigma2) > epsilon
        exact = sppm.iterations(epsilon, mu, sigma2, start, gamma)
        assert exact <= T + 1e-9
        if exact > 0:
            reached = sppm.rate(gamma, mu) ** exact * start + sppm.neighbourhood(gamma, mu, sigma2)
            assert reached == pytest.approx(epsilon, rel=1e-9)
    assert tight > 10
    assert sppm.iterations(0.5, 1.0, 2.0, 9.0, gamma=2.0) == math.inf  # the neighbourhood is 1
    assert sppm.iterations(0.5, 1.0, 0.0, 0.1) == 0.0 == sppm.iterations(0.5, 1.0, 0.0, 0.1, gamma=1.0)
    assert sppm.stepsize_for(0.1, 1.0, 0.0) == math.inf


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
        # Closed forms of P6; a sampling is built for some of the clusterings only, because under type checks that is slow.
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


@each
def test_fedprox_is_within_its_theorem(sampling):
    """T43 (L4842), K = 1: A_S and B_S by their definition, and one step with weights 1/|S| (P3)"""
    a, x = gradients_at(STAR), starts()
    before, outcomes = squares(x - STAR), list(sampling.outcomes())
    for gamma in GAMMAS:
        A, B = sppm.fedprox(gamma, MU, a, sampling.shares)
        shrink, noise = 1 / (1 + gamma * MU), gamma / ((1 + gamma * MU) * MU) * squares(a)
        wanted = [sum(chance * of[list(ids)].mean() for chance, ids in outcomes) for of in (shrink, noise)]
        np.testing.assert_allclose([A, B], wanted, rtol=1e-12)
        after = 0.0
        for chance, ids in outcomes:
            mean = np.mean([prox(gamma, np.eye(N)[i], x) for i in ids], axis=0)
            after = after + chance * squares(mean - STAR)
        assert np.all(after <= (A * before + B) * (1 + 1e-9))
        distance = 5.0
        for t in range(4):
            assert distance <= sppm.fedprox_bound(t, 5.0, A, B) * (1 + 1e-12)
            distance = A * distance + B
        assert sppm.fedprox_bound(0, 5.0, A, B) == pytest.approx(5.0 + B / (1 - A))


def test_the_prox_of_two_anchors_is_one_prox():
    """T44 (L4854) in the form of P2; the golden prox"""
    golden = GOLDENS["prox_quadratic"]
    H, linear, y = (np.array(golden[name]) for name in ("H", "b", "y"))
    problem = quadratic.Quadratic(H[None], np.linalg.solve(H, linear)[None])  # f(x) = 1/2 x'Hx - b'x
    np.testing.assert_allclose(prox(golden["gamma"], np.ones(1), y, problem), golden["prox"], rtol=1e-12)
    case = golden["fedavg_sppm"]
    gamma, alpha, x_t, x_k = golden["gamma"], case["alpha"], np.array(case["x_t"]), np.array(case["x_k"])
    stepsize, centre = sppm.two_anchor(alpha, gamma, x_t, x_k)
    assert stepsize == pytest.approx(alpha * gamma / (alpha + gamma))
    found = prox(stepsize, np.ones(1), centre, problem)
    np.testing.assert_allclose(found, case["value"], rtol=1e-12)
    slope = H @ (found - problem.c[0]) + (found - x_t) / gamma + (found - x_k) / alpha
    np.testing.assert_allclose(slope, 0, atol=1e-13)
    printed = prox(stepsize, np.ones(1), x_k, problem)  # the thesis drops x_t
    assert np.linalg.norm(printed - found) > 0.4
    same, centre = sppm.two_anchor(alpha, gamma, x_k, x_k)
    assert same == stepsize and np.array_equal(centre, x_k)  # the two agree in the first local round only


def test_many_rounds_of_averaged_proxes_do_not_give_the_prox_of_the_cohort():
    """P2: neither FedAvg-SPPM-AS nor FedProx-SPPM-AS tends to prox_{gamma f_S}(x_t) as K grows, nor to each other"""
    gamma, alpha, x_t = 2.0, 0.5, np.ones(D)
    wanted = prox(gamma, np.full(N, 1 / N), x_t)
    anchored = free = x_t
    for _ in range(300):
        stepsize, centre = sppm.two_anchor(alpha, gamma, x_t, anchored)
        anchored = np.mean([prox(stepsize, np.eye(N)[i], centre) for i in range(N)], axis=0)
        free = np.mean([prox(gamma, np.eye(N)[i], free) for i in range(N)], axis=0)
    assert min(np.linalg.norm(anchored - wanted), np.linalg.norm(free - wanted), np.linalg.norm(free - anchored)) > 0.02
    tiny = x_t  # a small alpha does bring FedAvg-SPPM-AS there: it is then gradient descent
    for _ in range(3000):
        stepsize, centre = sppm.two_anchor(0.003, gamma, x_t, tiny)
        tiny = np.mean([prox(stepsize, np.eye(N)[i], centre) for i in range(N)], axis=0)
    assert np.linalg.norm(tiny - wanted) < 0.1 * np.linalg.norm(anchored - wanted)


@pytest.mark.parametrize("gamma", [0.01, 1.0, 100.0])
def test_an_inexact_step_is_within_the_lemma(gamma):
    """T45 (L5671): the error points away from x*, its square is b"""
    a, x = gradients_at(STAR), starts()
    before = squares(x - STAR)
    for sampling in (SAMPLINGS[4], SAMPLINGS[6], SAMPLINGS[9]):
        mu, sigma2 = sampling.mu(MU), sampling.variance(a)
        limit = sppm.inexact_limit(gamma, mu)
        for b in (1e-6, 1e-2):
            after = 0.0
            for chance, ids in sampling.outcomes():
                away = prox(gamma, cohort_weights(sampling, ids), x) - STAR
                after = after + chance * (np.sqrt(squares(away)) + math.sqrt(b)) ** 2
            for s in (0.01 * limit, 0.3 * limit, 0.99 * limit, 7 * limit, None):
                allowed = np.array([sppm.inexact_one_step(d, gamma, mu, sigma2, b, s) for d in before])
                assert np.all(after <= allowed * (1 + 1e-12))
                if s is not None and s > limit:
                    continue  # one step holds for every s, several do not (P5)
                unrolled = [sppm.inexact_bound(1, d, gamma, mu, sigma2, b, s) for d in before]
                assert np.all(allowed <= np.array(unrolled) * (1 + 1e-9))


def test_the_unrolled_inexact_bound():
    """T45: the golden, the recurrence it comes from, the exact theorem at b = 0"""
    golden = GOLDENS["sppm_inexact"]
    gamma, mu, s, b, sigma2 = (golden[name] for name in ("gamma", "mu", "s", "b", "sigma2"))
    assert sppm.inexact_limit(gamma, mu) == pytest.approx(golden["s_max"])
    assert sppm.inexact_rate(gamma, mu, s) == pytest.approx(golden["rate"])
    assert sppm.inexact_neighbourhood(gamma, mu, sigma2, b, s) == pytest.approx(golden["neighborhood"])
    for s in (0.1, 0.5, 1.2, None):
        distance, fixed = 7.0, sppm.inexact_neighbourhood(gamma, mu, sigma2, b, s)
        assert sppm.inexact_one_step(fixed, gamma, mu, sigma2, b, s) == pytest.approx(fixed, rel=1e-12)
        for t in range(30):
            assert distance <= sppm.inexact_bound(t, 7.0, gamma, mu, sigma2, b, s) * (1 + 1e-12)
            distance = sppm.inexact_one_step(distance, gamma, mu, sigma2, b, s)
        assert distance >= 0.5 * min(fixed, 7.0)
    assert sppm.inexact_bound(3, 7.0, gamma, mu, sigma2, 0.0) == pytest.approx(sppm.bound(3, 7.0, gamma, mu, sigma2))
    assert sppm.inexact_bound(3, 7.0, gamma, mu, sigma2, b, 0.5) == pytest.approx(golden["rate"] ** 3 * 7 + 4.09)


def test_the_best_s_is_best():
    rng = np.random.default_rng(10)
    for _ in range(50):
        gamma, mu, sigma2, b = 10.0 ** rng.uniform(-2, 2, 4)
        best, limit = sppm.best_s(gamma, mu, sigma2, b), sppm.inexact_limit(gamma, mu)
        assert 0 < best < limit
        least = sppm.inexact_neighbourhood(gamma, mu, sigma2, b)
        assert least == sppm.inexact_neighbourhood(gamma, mu, sigma2, b, best)
        around = np.concatenate([best * np.array([0.99, 1.01]), limit * np.linspace(0.001, 0.999, 50)])
        assert all(sppm.inexact_neighbourhood(gamma, mu, sigma2, b, s) >= least for s in around[around < limit])
        # without sampling noise s = gamma mu, and errors that always point outwards attain the bound
        assert sppm.best_s(gamma, mu, 0.0, b) == pytest.approx(gamma * mu, rel=1e-12)
        attained = b * ((1 + gamma * mu) / (gamma * mu)) ** 2
        assert sppm.inexact_neighbourhood(gamma, mu, 0.0, b) == pytest.approx(attained, rel=1e-9)


def test_the_inexact_lemma_is_false_for_larger_s():
    """T45, P5: as printed, for s >= gamma^2 mu^2 + 2 gamma mu, it promises less than nothing at x_0 = x*"""
    gamma, mu, b, s = 1.0, 0.5, 0.01, 2.0
    printed = (1 + s) * b * (1 + gamma * mu) ** 2 / s / (gamma**2 * mu**2 + 2 * gamma * mu - s)
    assert printed < 0 <= b  # and the point may be at distance b from x* after one step
    for s in (1.25, 2.0, 0.0, -0.1, math.nan):
        for refused in (
            lambda s: sppm.inexact_neighbourhood(gamma, mu, 1.0, b, s),
            lambda s: sppm.inexact_bound(2, 1.0, gamma, mu, 1.0, b, s),
        ):
            with pytest.raises(ValueError, match=r"s=.*; allowed: 0 < s < gamma\^2 mu\^2 \+ 2 gamma mu = 1.25"):
                refused(s)
    for s in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"s=.*; allowed: positive"):
            sppm.inexact_one_step(1.0, gamma, mu, 1.0, b, s)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_residual_certifies_the_error_of_a_prox(gamma):
    rng = np.random.default_rng(11)
    for sampling in SAMPLINGS[:6]:
        for _, ids in sampling.outcomes():
            weights, y = cohort_weights(sampling, ids), 3 * rng.standard_normal(D)
            best, H = prox(gamma, weights, y), np.einsum("n,nij->ij", weights, PROBLEM.H)
            x = best + rng.standard_normal((20, D))
            residual = np.linalg.norm((x - best) @ (H + np.eye(D) / gamma), axis=1)
            sure = sppm.squared_prox_error(residual, gamma, float(weights @ MU))
            assert np.all(squares(x - best) <= sure * (1 + 1e-9))
            assert np.all(sure <= sppm.squared_prox_error(residual, gamma, sampling.mu(MU)) * (1 + 1e-12))
    x = rng.standard_normal(D)  # f = mu/2 |x|^2: an equality
    assert sppm.squared_prox_error(np.linalg.norm((0.3 + 1 / gamma) * x), gamma, 0.3) == pytest.approx(squares(x))


def test_costs():
    """P11 (L2343)"""
    for row in GOLDENS["costs"]:
        ours = sppm.cost(row["c1"], row["c2"], row["K"], row["T"])
        assert ours == pytest.approx(row["sppm"])
        if "localgd" in row:
            theirs = sppm.localgd_cost(row["c1"], row["c2"], row["localgd_T"])
            assert theirs == pytest.approx(row["localgd"])
            assert 100 * (1 - ours / theirs) == pytest.approx(row["reduction_pct"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sppm.rate(0.0, 1.0), r"gamma=0.0; allowed: positive"),
        (lambda: sppm.rate(1.0, math.nan), r"mu=nan; allowed: positive"),
        (lambda: sppm.neighbourhood(1.0, 1.0, -1.0), r"sigma2=-1.0; allowed: at least 0"),
        (lambda: sppm.neighbourhood(-1.0, 1.0, 1.0), r"gamma=-1.0"),
        (lambda: sppm.one_step(1.0, 1.0, 1.0, -2.0), r"sigma2=-2.0"),
        (lambda: sppm.recurrence(1.0, 1.0, 1.0, 1), r"a=1.0; allowed: 0 <= a < 1"),
        (lambda: sppm.stepsize_for(0.0, 1.0, 1.0), r"epsilon=0.0; allowed: positive"),
        (lambda: sppm.stepsize_for(0.1, 1.0, -1.0), r"sigma2=-1.0"),
        (lambda: sppm.iterations(0.1, 0.0, 1.0, 1.0), r"mu=0.0"),
        (lambda: sppm.iterations(0.1, 1.0, 1.0, 0.0), r"distance2=0.0"),
        (lambda: sppm.iterations(0.1, 1.0, -1.0, 1.0), r"sigma2=-1.0"),
        (lambda: sppm.squared_prox_error(1.0, 0.0, 1.0), r"gamma=0.0"),
        (lambda: sppm.squared_prox_error(1.0, 1.0, -1.0), r"mu=-1.0; allowed: at least 0"),
        (lambda: sppm.best_s(1.0, 1.0, 1.0, -1.0), r"b=-1.0; allowed: at least 0"),
        (lambda: sppm.inexact_limit(0.0, 1.0), r"gamma=0.0"),
        (lambda: sppm.inexact_rate(1.0, 1.0, 3.0), r"s=3.0; allowed"),
        (lambda: sppm.inexact_bound(1, 1.0, 1.0, 1.0, 1.0, -1.0), r"b=-1.0"),
        (lambda: sppm.fedprox(1.0, np.array([0.0]), np.ones((1, 1)), np.ones(1)), r"mu=0.0; allowed: positive"),
        (lambda: sppm.cost(-1.0, 0.0, 1, 1), r"c1=-1.0; allowed: at least 0"),
        (lambda: sppm.cost(1.0, 0.0, 0, 1), r"K=0; allowed: at least 1"),
        (lambda: sppm.localgd_cost(1.0, 0.0, 0), r"T=0; allowed: at least 1"),
        (lambda: sppm.nice_variance(3, 0, 1.0), r"tau=0; allowed: 1 to n=3"),
        (lambda: sppm.nice_variance(3, 4, 1.0), r"tau=4; allowed: 1 to n=3"),
        (lambda: sppm.optimal_clustering_bounds(1.0, 0, 2), r"b=0, m=2; allowed: both at least 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
