"""FedP3's bounds, in plain numbers: aggregation sketches and global pruning.

The loss f_i of client i is L_i-smooth and bounded below, f = mean_i f_i, Lbar = mean_i L_i, and L_max = max_i L_i.
There are K rounds with stepsize gamma, w^k is the model after round k, and Delta_0 = f(w^0) - inf f.  S_i is the sketch
of client i in the aggregation, and P_i its pruning mask.  The private variant is in `theory.ldp_fedp3`, the numbers of
parameters that clients send are in `theory.fedp3_counts`.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "n"]


class Abc(NamedTuple):
    """Constants of the bound E |g(w)|^2 <= 2 A (f(w) - inf f) + B |grad f(w)|^2 + C (thesis: Sec. C.4.1).

    Attributes:
        A: factor of the suboptimality.
        B: factor of the squared gradient norm.
        C: constant term.
    """

    A: float
    B: float
    C: float


def gradient_bound(L: float, gap: float) -> float:
    """Return the bound |grad f_i(w)|^2 <= 2 L_i (f_i(w) - inf f_i).

    Thesis: Lemma C.4.1.  Differs (docs/errata.md): F11 (inf f_i, not inf f: clients do not share their minima).

    Args:
        L: L_i, the smoothness constant of f_i.
        gap: f_i(w) - inf f_i.

    Returns:
        The bound.
    """
    return 2 * L * gap


def sketch_moment(ys: Float[np.ndarray, "n d"]) -> float:
    """Return the second moment of the sketched mean.

        E |(1/n) sum_i S_i y_i|^2 = (1/n) sum_i |y_i|^2

    S_i is the random sketch of client i.

    Thesis: Thm C.4.4.  Holds if: all clients take their sketches S_i from one shared permutation.

    Args:
        ys: y_i, the vectors of the clients, [n, d].

    Returns:
        The moment, exactly.

    >>> sketch_moment(np.array([[3.0, 4.0], [0.0, 1.0]]))
    13.0
    """
    return float(np.mean(np.sum(ys**2, axis=1)))


def sketch_variance(ys: Float[np.ndarray, "n d"]) -> float:
    """Return the variance of the sketched mean.

        E |(1/n) sum_i S_i y_i - mean_i y_i|^2 = mean_i |y_i|^2 - |mean_i y_i|^2

    S_i is the random sketch of client i.

    Thesis: Sec. C.4.1.

    Args:
        ys: y_i, the vectors of the clients, [n, d].

    Returns:
        The variance, exactly.
    """
    return sketch_moment(ys) - float(np.sum(np.mean(ys, axis=0) ** 2))


def aggregation_constants(L: Vector, inf_f: float, infs: Vector) -> Abc:
    """Return A = L_max, B = 0, C = 2 L_max (inf f - mean_i inf f_i) of g = (1/n) sum_i S_i grad f_i(w).

    Thesis: Lemma C.4.3.  Differs (docs/errata.md): F11 (C = 0 only if the clients share a minimiser).

    Args:
        L: smoothness constants L_i, [n].
        inf_f: inf f.
        infs: inf f_i, [n].

    Returns:
        The constants.

    >>> aggregation_constants(np.array([1.0, 3.0]), 0.5, np.zeros(2))
    Abc(A=3.0, B=0.0, C=3.0)
    """
    largest = float(L.max())
    return Abc(largest, 0.0, max(0.0, 2 * largest * (inf_f - float(infs.mean()))))


def stationarity(abc: Abc, L_mean: float, gamma: float, K: int, delta0: float) -> float:
    """Return the bound on the smallest squared gradient norm over K rounds (Khaled and Richtarik).

        min_k E |grad f(w^k)|^2 <= Lbar C gamma + 2 (1 + Lbar A gamma^2)^K Delta_0 / (gamma K)   over k < K

    Thesis: Thm C.4.5; with `aggregation_constants`, the theorem on personalized model aggregation (Sec. 4.3).
    Holds if: gamma <= 1 / (Lbar B).
    Differs (docs/errata.md): F11 (the theorem of Sec. 4.3 leaves out the first term).

    Args:
        abc: the constants A, B, C.
        L_mean: Lbar, the mean of the smoothness constants L_i.
        gamma: stepsize.
        K: number of rounds.
        delta0: Delta_0 = f(w^0) - inf f.

    Returns:
        The bound.
    """
    if gamma * L_mean * abc.B > 1:
        raise ValueError(f"gamma={gamma}; allowed: at most 1 / (Lbar B) = {1 / (L_mean * abc.B)}")
    return L_mean * abc.C * gamma + 2 * (1 + L_mean * abc.A * gamma**2) ** K * delta0 / (gamma * K)


def aggregation_stepsize(L: Vector, K: float | int) -> float:
    """Return the stepsize gamma = min(1 / L_max, 1 / sqrt(Lbar L_max K)), for which (1 + Lbar L_max gamma^2)^K <= e.

    Thesis: Sec. 4.3.  Differs (docs/errata.md): F12 (gamma is a minimum, and Lbar = mean_i L_i).

    Args:
        L: smoothness constants L_i, [n].
        K: number of rounds.

    Returns:
        gamma.

    >>> aggregation_stepsize(np.array([2.0, 8.0]), 10)
    0.05
    """
    return float(min(1 / L.max(), 1 / np.sqrt(L.mean() * L.max() * K)))


def rounds_to(epsilon: float, delta0: float, L: Vector) -> float:
    """Return the number of rounds after which 6 Delta_0 / (gamma K) <= epsilon, with `aggregation_stepsize`.

        K = max(36 Delta_0^2 Lbar L_max / epsilon^2, 6 Delta_0 L_max / epsilon)

    Thesis: Sec. C.3.2.  Holds if: C = 0 in `aggregation_constants`.
    Differs (docs/errata.md): F13 (Lbar L_max belongs into the numerator).  The second term is for gamma = 1 / L_max.

    Args:
        epsilon: target accuracy.
        delta0: Delta_0 = f(w^0) - inf f.
        L: smoothness constants L_i, [n].

    Returns:
        K, not rounded.
    """
    return float(max(36 * delta0**2 * L.mean() * L.max() / epsilon**2, 6 * delta0 * L.max() / epsilon))


def advantage_over_gd(n: int, epsilon: float) -> float:
    """Return (nd / epsilon) / (d / epsilon^2) = n epsilon, the communication of gradient descent relative to FedP3.

    Constants are left out.  For epsilon < 1/n gradient descent is cheaper.
    Thesis: Sec. C.3.2, Sec. 4.3.  Differs (docs/errata.md): F14 (n epsilon, not n / epsilon).

    Args:
        n: number of clients.
        epsilon: target accuracy.

    Returns:
        The ratio.

    >>> advantage_over_gd(100, 0.001)
    0.1
    """
    return n * epsilon


# --- global pruning: f_i(w) = w^T L_i w / 2, S_i = I, w <- mean_i P_i (w - gamma L_i P_i w)


class Pruning(NamedTuple):
    """Constants of the global pruning theorem; see `pruning_constants`.

    Attributes:
        W: W = E[P Lbar B + B Lbar P] / 2.
        theta: the smallest theta with E[B Lbar B] <= theta W; infinite if there is none.
    """

    W: Float[np.ndarray, "d d"]
    theta: float


def pruning_constants(
    L: Float[np.ndarray, "n d d"], probability: Float[np.ndarray, "w"], masks: Float[np.ndarray, "w n d"]
) -> Pruning:
    """Return W and theta of the global pruning theorem, with P = mean_i P_i and B = mean_i P_i L_i P_i.

    Thesis: Thm C.3.5.  Differs (docs/errata.md): F21 (P Lbar B is symmetrised, and B is that of the proof).

    Args:
        L: smoothness matrices L_i of the clients.
        probability: probability of each outcome.
        masks: for each outcome, the diagonals (0 or 1) of the P_i of all clients.

    Returns:
        W and theta.
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
    """Return sup_w f(Pw) / f(w) for f(w) = w^T L w / 2; 1 + gamma^2 h must be at least this large.

    Thesis: Assumption C.4.8.
    Differs (docs/errata.md): F21 (the theorem allows 1 + log(2)/K, which the supremum can exceed by far).

    Args:
        L: smoothness matrix, [d, d].
        P: diagonal of the pruning matrix (0 or 1), [d].

    Returns:
        The supremum.

    >>> round(pruning_growth(np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([1.0, 0.0])), 4)
    5.2632
    """
    root = np.linalg.cholesky(L)
    moved = np.linalg.solve(root, P[:, None] * root)
    return float(np.linalg.norm(moved, 2) ** 2)


def pruning_stepsize(theta: float, h: float, K: int) -> float:
    """Return the stepsize gamma = min(sqrt(log 2 / (h K)), 1 / theta) of global pruning.

    Thesis: Thm C.3.5.  Holds if: h does not depend on gamma (erratum F21 in docs/errata.md).

    Args:
        theta: see `Pruning`.
        h: constant of f(Pw) <= (1 + gamma^2 h) f(w).
        K: number of rounds.

    Returns:
        gamma.
    """
    return min(math.sqrt(math.log(2) / (h * K)) if h > 0 else math.inf, 1 / theta)


def pruning_bound(gamma: float, K: int, delta0: float) -> float:
    """Return the bound E |grad f(w)|^2 <= 4 Delta_0 / (gamma K) in the norm of Lbar^{-1} W Lbar^{-1}.

    Thesis: Thm C.3.5.
    Holds if: w is drawn from w^0, ..., w^{K-1} with `recursion_weights`, and f(Pw) <= (1 + gamma^2 h) f(w).
    Differs (docs/errata.md): F21 (the bound does not hold for every w^k).

    Args:
        gamma: stepsize.
        K: number of rounds.
        delta0: Delta_0 = f(w^0) - inf f.

    Returns:
        The bound.
    """
    return 4 * delta0 / (gamma * K)


def recursion_weights(a: float, K: int) -> Vector:
    """Return the weights p_k = a^{K-1-k} / S_K with S_K = sum_k a^{K-1-k}.

    Thesis: Lemma C.4.9.

    Args:
        a: factor of the recursion.
        K: number of rounds.

    Returns:
        p_k, [K].

    >>> recursion_weights(2.0, 3).tolist()
    [0.5714285714285714, 0.2857142857142857, 0.14285714285714285]
    """
    powers = a ** np.arange(K - 1.0, -1.0, -1.0)
    return powers / powers.sum()


def recursion_bound(a: float, K: int, first: float, last: float, c: float) -> float:
    """Return the bound sum_k p_k Y_k <= (a^K X_0 - X_K) / S_K + c, if X_{k+1} <= a X_k - Y_k + c.

    The weights p_k and their normalisation S_K = sum_k a^{K-1-k} are those of `recursion_weights`.

    Thesis: Lemma C.4.9.

    Args:
        a: factor of the recursion.
        K: number of rounds.
        first: X_0.
        last: X_K.
        c: constant of the recursion.

    Returns:
        The bound.
    """
    total = float(np.sum(a ** np.arange(K - 1.0, -1.0, -1.0)))
    return (a**K * first - last) / total + c
