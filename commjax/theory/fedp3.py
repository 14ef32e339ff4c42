"""FedP3's bounds and counts, in plain numbers: aggregation sketches, global pruning, what clients send.

Throughout, client i has f_i L_i-smooth and bounded below, f = mean_i f_i, Delta_0 = f(w^0) - inf f, and K rounds have
stepsize gamma.  The private variant is in `theory.ldp_fedp3`.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "n"]


class Abc(NamedTuple):
    """E |g(w)|^2 <= 2 A (f(w) - inf f) + B |grad f(w)|^2 + C.  Thesis: Assumption L4317."""

    A: float
    B: float
    C: float


def gradient_bound(L: float, gap: float) -> float:
    """|grad f_i(w)|^2 <= 2 L_i (f_i(w) - inf f_i), from `gap` = f_i(w) - inf f_i.

    Thesis: Lemma L4287.  Differs: F11 (inf f_i, not inf f: clients do not share their minima).
    """
    return 2 * L * gap


def sketch_moment(ys: Float[np.ndarray, "n d"]) -> float:
    """E |(1/n) sum_i S_i y_i|^2 = (1/n) sum_i |y_i|^2, an equality.  Thesis: L4346.  Holds if: the permutation is shared.

    >>> sketch_moment(np.array([[3.0, 4.0], [0.0, 1.0]]))
    13.0
    """
    return float(np.mean(np.sum(ys**2, axis=1)))


def sketch_variance(ys: Float[np.ndarray, "n d"]) -> float:
    """E |(1/n) sum_i S_i y_i - mean_i y_i|^2 = mean_i |y_i|^2 - |mean_i y_i|^2.  Thesis: L4378."""
    return sketch_moment(ys) - float(np.sum(np.mean(ys, axis=0) ** 2))


def aggregation_constants(L: Vector, inf_f: float, infs: Vector) -> Abc:
    """A = L_max, B = 0, C = 2 L_max (inf f - mean_i inf f_i) of g = (1/n) sum_i S_i grad f_i(w).

    Thesis: Lemma L4329.  Differs: F11 (C = 0 only if the clients share a minimiser).

    >>> aggregation_constants(np.array([1.0, 3.0]), 0.5, np.zeros(2))
    Abc(A=3.0, B=0.0, C=3.0)
    """
    largest = float(L.max())
    return Abc(largest, 0.0, max(0.0, 2 * largest * (inf_f - float(infs.mean()))))


def stationarity(abc: Abc, L_mean: float, gamma: float, K: int, delta0: float) -> float:
    """min_k E |grad f(w^k)|^2 <= Lbar C gamma + 2 (1 + Lbar A gamma^2)^K Delta_0 / (gamma K) over k < K.

    Thesis: Thm L4388 (Khaled and Richtarik); with `aggregation_constants`, Thm L1770.
    Holds if: gamma <= 1 / (Lbar B).  Differs: F11 (the first term, which Thm L1770 leaves out).
    """
    if gamma * L_mean * abc.B > 1:
        raise ValueError(f"gamma={gamma}; allowed: at most 1 / (Lbar B) = {1 / (L_mean * abc.B)}")
    return L_mean * abc.C * gamma + 2 * (1 + L_mean * abc.A * gamma**2) ** K * delta0 / (gamma * K)


def aggregation_stepsize(L: Vector, K: float | int) -> float:
    """gamma = min(1 / L_max, 1 / sqrt(Lbar L_max K)): then (1 + Lbar L_max gamma^2)^K <= e.

    Thesis: Thm L1770.  Differs: F12 (a minimum, and Lbar = mean_i L_i).

    >>> aggregation_stepsize(np.array([2.0, 8.0]), 10)
    0.05
    """
    return float(min(1 / L.max(), 1 / np.sqrt(L.mean() * L.max() * K)))


def rounds_to(epsilon: float, delta0: float, L: Vector) -> float:
    """K = max(36 Delta_0^2 Lbar L_max / epsilon^2, 6 Delta_0 L_max / epsilon): 6 Delta_0 / (gamma K) <= epsilon.

    Thesis: L4138.  Holds if: C = 0.  Differs: F13 (Lbar L_max belongs into the numerator); the second term, for 1 / L_max.
    """
    return float(max(36 * delta0**2 * L.mean() * L.max() / epsilon**2, 6 * delta0 * L.max() / epsilon))


def advantage_over_gd(n: int, epsilon: float) -> float:
    """(nd / epsilon) / (d / epsilon^2) = n epsilon: how many times as much gradient descent sends, up to constants.

    Thesis: L4150, L1777.  Differs: F14 (not n / epsilon: below epsilon = 1/n gradient descent is the cheaper one).

    >>> advantage_over_gd(100, 0.001)
    0.1
    """
    return n * epsilon


# --- global pruning: f_i(w) = w^T L_i w / 2, S_i = I, w <- mean_i P_i (w - gamma L_i P_i w)


class Pruning(NamedTuple):
    """W = E[P Lbar B + B Lbar P] / 2 and the least theta with E[B Lbar B] <= theta W; infinite if there is none."""

    W: Float[np.ndarray, "d d"]
    theta: float


def pruning_constants(
    L: Float[np.ndarray, "n d d"], probability: Float[np.ndarray, "w"], masks: Float[np.ndarray, "w n d"]
) -> Pruning:
    """W and theta over outcomes `masks` (0 or 1) of all clients: P = mean_i P_i, B = mean_i P_i L_i P_i.

    Thesis: Thm L4270.  Differs: F21 (the symmetrisation of P Lbar B; B as in the proof).
    """
    mean = L.mean(axis=0)
    P = np.einsum("wnd,de->wde", masks / masks.shape[1], np.eye(mean.shape[0]))
    B = np.einsum("wni,nij,wnj->wij", masks, L, masks) / masks.shape[1]
    half = np.einsum("w,wij->ij", probability, P @ mean @ B)
    W = (half + half.T) / 2
    second = np.einsum("w,wij->ij", probability, B @ mean @ B)
    values, vectors = np.linalg.eigh(W)
    if values[0] <= 1e-12 * values[-1]:
        return Pruning(W, math.inf)
    root = vectors / np.sqrt(values)
    return Pruning(W, float(np.linalg.eigvalsh(root.T @ second @ root)[-1]))


def pruning_growth(L: Float[np.ndarray, "d d"], P: Float[np.ndarray, "d"]) -> float:
    """sup_w f(Pw) / f(w) for f(w) = w^T L w / 2: what 1 + gamma^2 h must be at least.  Thesis: Assumption L4529; F21.

    >>> round(pruning_growth(np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([1.0, 0.0])), 4)
    5.2632
    """
    root = np.linalg.cholesky(L)
    moved = np.linalg.solve(root, P[:, None] * root)
    return float(np.linalg.norm(moved, 2) ** 2)


def pruning_stepsize(theta: float, h: float, K: int) -> float:
    """gamma = min(sqrt(log 2 / (h K)), 1 / theta).  Thesis: Thm L4270.  Holds if: h does not depend on gamma (F21)."""
    return min(math.sqrt(math.log(2) / (h * K)) if h > 0 else math.inf, 1 / theta)


def pruning_bound(gamma: float, K: int, delta0: float) -> float:
    """E |grad f(w)|^2 <= 4 Delta_0 / (gamma K) in the norm of Lbar^{-1} W Lbar^{-1}.

    Thesis: Thm L4270.  Holds if: w is drawn with `recursion_weights` (not any w^k, F21), f(Pw) <= (1 + gamma^2 h) f(w).
    """
    return 4 * delta0 / (gamma * K)


def recursion_weights(a: float, K: int) -> Vector:
    """p_k = a^{K-1-k} / S_K, S_K = sum_k a^{K-1-k}.  Thesis: Lemma L4574.

    >>> recursion_weights(2.0, 3).tolist()
    [0.5714285714285714, 0.2857142857142857, 0.14285714285714285]
    """
    powers = a ** np.arange(K - 1.0, -1.0, -1.0)
    return powers / powers.sum()


def recursion_bound(a: float, K: int, first: float, last: float, c: float) -> float:
    """sum_k p_k Y_k <= (a^K X_0 - X_K) / S_K + c if X_{k+1} <= a X_k - Y_k + c.  Thesis: Lemma L4574."""
    total = float(np.sum(a ** np.arange(K - 1.0, -1.0, -1.0)))
    return (a**K * first - last) / total + c


# --- what clients hold and send, from the numbers of parameters of the layers; the last of them is everybody's


def sent(layers: dict[str, int], trained: list[str]) -> int:
    """Parameters that a client sends: the layers it trains, and the last one always.

    >>> sent({"conv1": 4864, "fc1": 1638400, "ffc": 10240}, ["fc1"])
    1648640
    """
    names = list(layers)
    if unknown := [name for name in trained if name not in layers]:
        raise ValueError(f"trained={trained}; allowed: {', '.join(names)}, got {', '.join(unknown)}")
    return sum(layers[name] for name in {*trained, names[-1]})


def deployed(layers: dict[str, int], trained: list[str], keep: float) -> float:
    """Parameters that a client holds: those it sends, and `keep` of all others.  Thesis: L4037; Differs: F3, F7 (keep ratio)."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}; allowed: 0 < keep <= 1")
    whole = sent(layers, trained)
    return whole + keep * (sum(layers.values()) - whole)


def spread(values: list[float]) -> float:
    """(max - min) / min, which the thesis prints times 100.  Thesis: L4037.  Differs: F1 (per cent, not times).

    >>> round(100 * spread([15104.0, 1648640.0]), 2)
    10815.25
    """
    return (max(values) - min(values)) / min(values)


def selection_share(layers: dict[str, int], count: int) -> tuple[float, float]:
    """(share of the layers, expected share of the parameters) sent by a client with `count` layers drawn uniformly, and the last.

    Thesis: L1824.  Differs: F5 (20, 40 and 60 % saved are shares of the number of layers).

    >>> selection_share({"a": 10, "b": 30, "last": 10}, 1)
    (0.6666666666666666, 0.6)
    """
    *hidden, last = layers.values()
    if not 1 <= count <= len(hidden):
        raise ValueError(f"count={count}; allowed: 1 to {len(hidden)}")
    total = sum(hidden) + last
    return (count + 1) / len(layers), (count / len(hidden) * sum(hidden) + last) / total


def combined_saving(keep: float, saved: float) -> float:
    """1 - keep (1 - saved): of pruned layers, some are not sent.  Thesis: L1832; Differs: F6 (15.63 %, not 16.63 %).

    >>> combined_saving(0.9, 0.0625), combined_saving(0.9, 0.125)
    (0.15625, 0.21250000000000002)
    """
    return 1 - keep * (1 - saved)
