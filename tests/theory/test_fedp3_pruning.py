"""FedP3's global pruning (T57), its recursion (T58) and its counts of parameters (F1 to F6)."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.algorithms.fedp3 import sketched
from commjax.compressors import identity
from commjax.problems import quadratic
from commjax.theory import fedp3 as theory
from commjax.theory import fedp3_counts

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens_fedp3_theory.json").read_text())
KEY = jax.random.key(0)
value_and_grad = jax.value_and_grad(quadratic.loss)


# --- T57: global pruning, S = I


def all_masks(n, d, keep):
    one = [np.isin(np.arange(d), chosen).astype(float) for chosen in itertools.combinations(range(d), keep)]
    return np.array(list(itertools.product(one, repeat=n)))


def pruned_outcomes(L, masks, gamma, w):
    kept = masks * w
    return (kept - gamma * masks * np.einsum("nij,wnj->wni", L, kept)).mean(axis=1)


def test_with_diagonal_matrices_one_pruned_step_descends_in_the_norm_of_w():
    rng, n, d = np.random.default_rng(10), 2, 3
    for _ in range(10):
        L = np.einsum("nd,de->nde", rng.uniform(0.2, 3, (n, d)), np.eye(d))
        masks = all_masks(n, d, 2)
        chance = np.full(len(masks), 1 / len(masks))
        W, theta = theory.pruning_constants(L, chance, masks)
        mean, w = L.mean(axis=0), rng.standard_normal(d)
        assert all(theory.pruning_growth(mean, mask.mean(axis=0)) <= 1 + 1e-12 for mask in masks)
        gamma = theory.pruning_stepsize(theta, 0.0, 10)
        assert gamma == 1 / theta
        after = pruned_outcomes(L, masks, gamma, w)
        f = np.einsum("wi,ij,wj->w", after, mean, after).mean() / 2
        slope = np.linalg.solve(mean, mean @ w)  # Lbar^{-1} grad f = w here
        assert f <= w @ mean @ w / 2 - gamma / 2 * slope @ W @ slope + 1e-12
        # E[B Lbar B] <= theta W, and no less will do
        B = np.einsum("wni,nij,wnj->wij", masks, L, masks) / n
        gap = theta * W - (B @ mean @ B).mean(axis=0)
        values = np.linalg.eigvalsh(gap)
        assert values[0] >= -1e-12 and values[0] <= 1e-9 * values[-1] + 1e-12


def test_theta_is_the_least_that_dominates_where_the_matrices_are_not_diagonal():
    rng, n, d = np.random.default_rng(20), 2, 3
    root = 0.3 * rng.standard_normal((n, d, d))
    L = root @ root.transpose(0, 2, 1) + np.einsum("nd,de->nde", rng.uniform(1, 3, (n, d)), np.eye(d))
    masks = all_masks(n, d, 2)
    W, theta = theory.pruning_constants(L, np.full(len(masks), 1 / len(masks)), masks)
    second = np.mean(
        [b @ L.mean(axis=0) @ b for b in (sum(np.outer(r, r) * l for r, l in zip(m, L)) / n for m in masks)], axis=0
    )
    values = np.linalg.eigvalsh(theta * W - second)
    assert theta < np.inf and abs(values[0]) < 1e-10 < values[1]


def test_theta_has_the_units_of_l_and_a_w_that_is_not_positive_has_none():
    masks = all_masks(2, 2, 1)
    chance, L = np.full(len(masks), 1 / len(masks)), np.stack([np.diag([1.0, 2.0]), np.diag([3.0, 1.0])])
    theta = theory.pruning_constants(L, chance, masks).theta
    for unit in (1e-7, 1e7):
        assert theory.pruning_constants(unit * L, chance, masks).theta == pytest.approx(unit * theta, rel=1e-9)
        never = masks * np.array([1.0, 0.0])  # the second coordinate never stays
        assert theory.pruning_constants(unit * L, chance, never).theta == np.inf


def test_the_bound_holds_for_the_weighted_iterate_of_a_whole_run():
    """Exact: the second moment of w after every round"""
    rng, n, d, K = np.random.default_rng(11), 2, 3, 20
    L = np.einsum("nd,de->nde", rng.uniform(0.2, 3, (n, d)), np.eye(d))
    masks = all_masks(n, d, 2)
    W, theta = theory.pruning_constants(L, np.full(len(masks), 1 / len(masks)), masks)
    gamma = theory.pruning_stepsize(theta, 0.0, K)
    P = np.einsum("wnd,de->wde", masks / n, np.eye(d))
    maps = P - gamma * np.einsum("wni,nij,wnj->wij", masks, L, masks) / n
    w = rng.standard_normal(d)
    moment, seen = np.outer(w, w), []
    for _ in range(K):
        seen.append(np.trace(W @ moment))
        moment = np.einsum("wij,jk,wlk->il", maps, moment, maps) / len(maps)
    delta0 = float(w @ L.mean(axis=0) @ w / 2)
    mean = theory.recursion_weights(1.0, K) @ np.array(seen)
    assert mean <= theory.pruning_bound(gamma, K, delta0) / 2  # with h = 0 even half of it
    assert theory.pruning_bound(gamma, K, delta0) == pytest.approx(4 * delta0 / (gamma * K))
    # and it is about that iterate: the first one exceeds what holds on average
    assert seen[0] > mean


def test_the_printed_w_is_not_the_symmetrisation_and_not_symmetric():
    """F21: (P L B + P B L) / 2"""
    rng, n, d = np.random.default_rng(12), 2, 3
    root = rng.standard_normal((n, d, d))
    L = root @ root.transpose(0, 2, 1) + 0.1 * np.eye(d)
    masks, chance = np.array([[[1.0, 0, 1], [0, 1, 1]]]), np.ones(1)
    P = np.diag(masks[0].mean(axis=0))
    B, mean = np.einsum("ni,nij,nj->ij", masks[0], L, masks[0]) / n, L.mean(axis=0)
    printed = (P @ mean @ B + P @ B @ mean) / 2
    W, _ = theory.pruning_constants(L, chance, masks)
    w = rng.standard_normal(d)
    assert w @ W @ w == pytest.approx(w @ P @ mean @ B @ w)
    assert abs(w @ printed @ w - w @ P @ mean @ B @ w) > 0.05 and np.abs(printed - printed.T).max() > 0.05
    np.testing.assert_allclose(W, W.T)


def test_pruning_may_multiply_the_objective_and_the_assumption_is_then_circular():
    """F21: sup f(Pw) / f(w) = 5.26; 1 + log(2)/K is all that the stepsize leaves room for"""
    L = np.array([[1.0, 0.9], [0.9, 1.0]])
    growth = theory.pruning_growth(L, np.array([1.0, 0.0]))
    assert growth == pytest.approx(1 / (1 - 0.81))
    grid = np.random.default_rng(13).standard_normal((2000, 2))
    ratios = grid[:, 0] ** 2 / np.einsum("wi,ij,wj->w", grid, L, grid)
    assert 0.99 * growth < ratios.max() <= growth * (1 + 1e-12)
    for K in (1, 100):
        h = 0.3
        gamma = theory.pruning_stepsize(0.1, h, K)
        assert 1 + gamma**2 * h <= 1 + np.log(2) / K + 1e-12 < growth
    assert theory.pruning_stepsize(100.0, 0.3, 1) == 0.01
    masks = np.array([[[1.0, 0.0]]])
    assert theory.pruning_constants(L[None], np.ones(1), masks).theta == np.inf  # W is singular


def test_pruning_stops_elsewhere_than_at_the_minimiser_when_the_clients_have_one():
    """F21: with b_i != 0 the bias does not vanish"""
    problem = quadratic.Quadratic(np.tile(np.eye(2), (2, 1, 1)), np.tile([3.0, -2.0], (2, 1)))
    algorithm = sketched.sketched(value_and_grad, sketched.uniform(0.5), identity())
    data, w = jax.tree.map(jnp.asarray, problem), jnp.asarray(problem.c[0])
    state = algorithm.init(w, jnp.arange(2))
    after, _ = algorithm.step(KEY, sketched.HParams(1e-9), state, data)
    assert float(jnp.abs(after.server.params - w).max()) > 0.9  # at the minimiser, with no step to speak of


# --- T58: the recursion


@given(st.floats(1.001, 3.0), st.integers(1, 12), st.floats(0, 5), st.integers(0, 10**6))
def test_the_weighted_recursion(a, K, c, seed):
    rng = np.random.default_rng(seed)
    X, Y = [float(rng.uniform(0, 10))], []
    for _ in range(K):
        Y.append(float(rng.uniform(0, a * X[-1] + c)))
        X.append(float(rng.uniform(0, 1) * (a * X[-1] - Y[-1] + c)) if seed % 2 else a * X[-1] - Y[-1] + c)
    weights = theory.recursion_weights(a, K)
    assert weights.sum() == pytest.approx(1) and np.all(np.diff(weights) < 0)
    left, right = weights @ np.array(Y), theory.recursion_bound(a, K, X[0], X[-1], c)
    assert left <= right * (1 + 1e-9) + 1e-9
    if seed % 2 == 0:
        assert left == pytest.approx(right, rel=1e-6, abs=1e-6)


# --- counts, F1 to F6


def test_the_golden_counts():
    wrong_words = {"CIFAR10": 10815.25, "CIFAR100": 1522.91, "FashionMNIST": 13749.46, "EMNIST_L": 30.23}
    for name, printed in wrong_words.items():
        golden = GOLDENS["fedp3_params"][name]
        layers = golden["layers"]
        *hidden, _ = layers
        assert sum(layers.values()) == golden["total"]
        found = {layer: fedp3_counts.sent(layers, [layer]) for layer in hidden}
        assert found == golden["comm_lowerB"]
        spread = fedp3_counts.spread([float(value) for value in found.values()])
        assert round(100 * spread, 2) == pytest.approx(printed, abs=0.011)
        for ratio, wanted in golden["deployed"].items():
            sizes = {layer: fedp3_counts.deployed(layers, [layer], float(ratio)) for layer in hidden}
            assert sizes == pytest.approx(wanted)
            assert 100 * fedp3_counts.spread(list(sizes.values())) == pytest.approx(
                golden["deployed_rel_diff_pct"][ratio], abs=0.0051
            )
        for count in range(1, len(hidden) + 1):
            wanted = golden["opu"][f"OPU{count}"]
            assert fedp3_counts.selection_share(layers, count) == pytest.approx(
                (wanted["layer_fraction"], wanted["expected_param_fraction"])
            )
    cifar = GOLDENS["fedp3_params"]["CIFAR10"]["layers"]
    small, large = (fedp3_counts.deployed(cifar, [layer], 0.5) for layer in ("conv1", "fc1"))
    assert large / small - 1 == pytest.approx(0.5793, abs=5e-5)  # F3: larger by, not smaller by
    assert 1 - small / large == pytest.approx(0.3668, abs=5e-5)
    for part, golden in GOLDENS["fedp3_resnet"].items():
        if part in ("part", "full"):
            saved = fedp3_counts.combined_saving(0.9, golden["vs_full_pct"] / 100)
            assert 100 * saved == pytest.approx(golden["vs_fedavg_pct"])


def test_bad_counts_are_refused():
    layers = {"a": 1, "b": 2, "last": 3}
    with pytest.raises(ValueError, match=r"trained=\['c'\]; allowed: a, b, last, got c"):
        fedp3_counts.sent(layers, ["c"])
    for keep in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"keep={keep}; allowed: 0 < keep <= 1"):
            fedp3_counts.deployed(layers, ["a"], keep)
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"count={count}; allowed: 1 to 2"):
            fedp3_counts.selection_share(layers, count)
