"""SymWanda's theorems, T60-T69: identities at every weight of random matrices; the false one corrected, with its
counterexample."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from commjax.pruning import masks, regrow, scores, statistics
from commjax.theory import symwanda as theory

RNG = np.random.default_rng(0)
B, C = 5, 4
W = RNG.standard_normal((B, C))
X, Y = RNG.standard_normal((7, B)), RNG.standard_normal((C, 3))
STATS = statistics.of(jnp.array(X))
NORMS = np.linalg.norm(X, axis=0)
close = np.testing.assert_allclose


def costs(objective, X, Y):
    """The objective after setting each weight alone to zero."""
    found = np.zeros_like(W)
    for j, k in np.ndindex(W.shape):
        pruned = W.copy()
        pruned[j, k] = 0
        found[j, k] = objective(X, W, pruned, Y)
    return found


def test_t60_setting_one_weight_to_zero_costs_its_score():
    close(scores.general(jnp.array(X), jnp.array(Y))(jnp.array(W)), costs(theory.objective, X, Y), rtol=1e-12)


def test_t60_for_several_weights_the_objective_is_at_most_the_sum_of_the_scores_and_not_equal():
    """W16: sub-additive, not additive."""
    pruned = W * (RNG.random(W.shape) > 0.5)
    S = costs(theory.objective, X, Y)
    together = theory.objective(X, W, pruned, Y)
    assert together < 0.9 * S[pruned == 0].sum()


def test_t61_special_cases():
    w, nothing_in, nothing_out = jnp.array(W), np.zeros((7, B)), np.zeros((C, 3))
    close(scores.wanda()(w, STATS), costs(theory.objective, X, nothing_out), rtol=1e-12)
    outputs = statistics.of(jnp.array(X), jnp.array(RNG.standard_normal((7, C))))._replace(
        outputs=statistics.Sum(jnp.array((Y**2).sum(1)), jnp.zeros(C))
    )
    close(scores.owanda()(w, outputs), costs(theory.objective, nothing_in, Y), rtol=1e-12)
    close(scores.symmetric()(w), costs(theory.objective, W.T, W.T), rtol=1e-12)


@pytest.mark.parametrize("construction", [theory.constant_columns, theory.diagonal])
def test_t62_both_constructions_give_relative_importance(construction):
    X, Y = construction(W)
    assert X.shape == (B, B) and Y.shape == (C, C)
    close(scores.ri()(jnp.array(W)), costs(theory.objective, X, Y), rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_t63_ria_is_a_special_case_at_one_weight_at_a_time(alpha):
    S = scores.ria(alpha)(jnp.array(W), STATS)
    for j, k in np.ndindex(W.shape):
        X, Y = theory.at_one_weight(W, NORMS, alpha, j, k)
        close(costs(theory.objective, X, Y)[j, k], S[j, k], rtol=1e-12)


def test_t63_no_pair_of_matrices_gives_ria_everywhere():
    """W7: S / |W| would be u_j + v_k, whose mixed differences vanish; RI's do, RIA's do not."""

    def mixed(S):
        factor = np.asarray(S) / np.abs(W)
        return factor[1:, 1:] - factor[1:, :1] - factor[:1, 1:] + factor[:1, :1]

    assert np.max(np.abs(mixed(scores.ri()(jnp.array(W))))) < 1e-12
    assert np.max(np.abs(mixed(scores.ria()(jnp.array(W), STATS)))) > 0.01
    flat = STATS._replace(squares=statistics.Sum(jnp.full(B, 3.0), jnp.zeros(B)))
    assert np.max(np.abs(mixed(scores.ria()(jnp.array(W), flat)))) < 1e-12


def test_t64_scaled_columns_and_rows():
    A, D = RNG.standard_normal((6, B)), RNG.standard_normal((C, 2))
    DX, DY = theory.diagonal(W)
    close(
        scores.general_diagonal(jnp.array(A), jnp.array(D))(jnp.array(W)),
        costs(theory.objective, A @ DX, DY @ D),
        rtol=1e-12,
    )


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 4.0, math.inf])
def test_t65_every_p_norm_has_its_matrices(p):
    S = scores.ria(0.0, p)(jnp.array(W))
    X, Y = theory.proportional(W, p)
    assert X.shape == Y.shape == (C, B)
    close(costs(theory.objective, X, Y), S, rtol=1e-12)
    u, v = (a / np.linalg.norm(a) for a in (RNG.standard_normal(6), RNG.standard_normal(2)))
    close(costs(theory.objective, *theory.along(W, p, u, v)), S, rtol=1e-12)


def test_t66_sampled_sums_have_their_matrices():
    tau, w = 2, np.abs(W)
    inputs, outputs = np.zeros((B, C), bool), np.zeros((B, C), bool)
    for j in range(B):
        inputs[j, RNG.choice(C, tau, replace=False)] = True
    for k in range(C):
        outputs[RNG.choice(B, tau, replace=False), k] = True
    norms = (scores.given(jnp.array(a)) for a in ((w * inputs).sum(1), (w * outputs).sum(0)))
    close(scores.score(*norms)(jnp.array(W)), costs(theory.objective, *theory.on_sets(W, inputs, outputs)), rtol=1e-12)


def test_t67_the_squared_objective_has_the_root_score():
    w = jnp.array(W)
    close(
        scores.general(jnp.array(X), jnp.array(Y), scores.root)(w) ** 2,
        costs(theory.squared_objective, X, Y),
        rtol=1e-12,
    )
    S = scores.symmetric(scores.root)(w)
    G = np.asarray(S) / np.abs(W) / np.sqrt(B + C)
    close(np.linalg.norm(G), np.linalg.norm(W), rtol=1e-12)


def test_t67_the_squared_objective_cannot_always_be_relative_importance():
    """x_j^2 + y_k^2 = (1/r_j + 1/c_k)^2 has mixed differences 2 (1/r_i - 1/r_j)(1/c_k - 1/c_l), which are not zero."""
    squares = (1 / np.abs(W).sum(1)[:, None] + 1 / np.abs(W).sum(0)[None]) ** 2
    assert abs(squares[0, 0] + squares[1, 1] - squares[0, 1] - squares[1, 0]) > 1e-4


@pytest.mark.parametrize("group", ["output", "input", "layer"])
def test_t68_the_count_of_nonzeros_orders_dense_weights_as_wanda_and_magnitude(group):
    w = jnp.array(W)
    for alpha, other in ((0.0, scores.magnitude()(w)), (1.0, scores.wanda()(w, STATS))):
        S = scores.ria(alpha, 0.0)(w, STATS)
        assert np.array_equal(masks.unstructured(S, 0.5, group), masks.unstructured(other, 0.5, group))


def test_t69_one_swap_shrinks_the_expected_error_unless_it_overshoots():
    """And it overshoots only by turning the sign."""
    w = jnp.array(RNG.standard_normal((16, 600)))
    stats = statistics.of(jnp.array(RNG.standard_normal((40, 16)) + RNG.standard_normal(16)))
    mask = masks.unstructured(scores.wanda()(w, stats), 0.5)
    after_mask = regrow.dsnot(w, mask, stats, cycles=1, threshold=0.0)[1]
    contribution = np.asarray(w) * np.asarray(statistics.input_sum(stats))[:, None]
    before, after = (np.where(m, 0, contribution).sum(0) for m in (mask, after_mask))
    swapped = np.any(np.asarray(mask != after_mask), axis=0)
    kept_sign = swapped & (np.sign(before) == np.sign(after))
    assert swapped.sum() > 500 and kept_sign.sum() > 100
    assert np.all(np.abs(after[kept_sign]) < np.abs(before[kept_sign]))
    assert np.any(np.abs(after[swapped & ~kept_sign]) > np.abs(before[swapped & ~kept_sign]))
    assert np.all((after - before)[swapped] * np.sign(before[swapped]) < 0)
