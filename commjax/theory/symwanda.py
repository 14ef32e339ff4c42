"""The objectives of SymWanda and the matrices X, Y that turn them into scores, in plain NumPy.

    g(W~) = |X (W~ - W)|_F + |(W~ - W) Y|_F          X [a, in], W [in, out], Y [out, d]

Setting the weight W_jk to zero increases g by |W_jk| (|X_:j|_2 + |Y_k:|_2).  Hence each choice of X and Y gives a
score.
"""

import numpy as np
from jaxtyping import Bool, Float

Matrix = Float[np.ndarray, "_ _"]


def objective(X: Matrix, W: Matrix, pruned: Matrix, Y: Matrix) -> float:
    """Return |X (W~ - W)|_F + |(W~ - W) Y|_F.

    Thesis: equation (Sym), Sec. 6.3.2.

    Args:
        X: [a, in].
        W: weights [in, out].
        pruned: W~, the pruned weights [in, out].
        Y: [out, d].

    Returns:
        The objective.

    >>> objective(np.array([[3.0], [4.0]]), np.array([[2.0]]), np.array([[0.0]]), np.array([[1.0]]))
    12.0
    """
    return float(np.linalg.norm(X @ (pruned - W)) + np.linalg.norm((pruned - W) @ Y))


def squared_objective(X: Matrix, W: Matrix, pruned: Matrix, Y: Matrix) -> float:
    """Return |X (W~ - W)|_F^2 + |(W~ - W) Y|_F^2.

    Thesis: Sec. E.2.

    Args:
        X: [a, in].
        W: weights [in, out].
        pruned: W~, the pruned weights [in, out].
        Y: [out, d].

    Returns:
        The objective.
    """
    return float(np.sum((X @ (pruned - W)) ** 2) + np.sum(((pruned - W) @ Y) ** 2))


def constant_columns(W: Matrix) -> tuple[Matrix, Matrix]:
    """Return X and Y for the score RI, with constant columns of X and rows of Y.

        X_:j = (1, ..., 1) / (sqrt(in) |W_j:|_1)        Y_k: = (1, ..., 1) / (sqrt(out) |W_:k|_1)

    Thesis: Thm 6.3.5.  Holds if: no input or output is all zeros.

    Args:
        W: weights [in, out].

    Returns:
        X [in, in] and Y [out, out].
    """
    b, c = W.shape
    X = np.tile(1 / (np.sqrt(b) * np.abs(W).sum(1)), (b, 1))
    return X, np.tile(1 / (np.sqrt(c) * np.abs(W).sum(0)), (c, 1)).T


def diagonal(W: Matrix) -> tuple[Matrix, Matrix]:
    """Return X and Y for the score RI, as diagonal matrices.

        X = Diag(1 / |W_j:|_1)        Y = Diag(1 / |W_:k|_1)

    Thesis: Thm 6.3.5.

    Args:
        W: weights [in, out].

    Returns:
        X [in, in] and Y [out, out].
    """
    return np.diag(1 / np.abs(W).sum(1)), np.diag(1 / np.abs(W).sum(0))


def proportional(W: Matrix, p: float) -> tuple[Matrix, Matrix]:
    """Return X and Y for the l_p score, with columns of X and rows of Y proportional to the weights.

        X_:j = W_j:^T / (|W_j:|_p |W_j:|_2)        Y_k: = W_:k^T / (|W_:k|_p |W_:k|_2)

    Thesis: Lemma 6.3.8.

    Args:
        W: weights [in, out].
        p: order of the norm.

    Returns:
        X and Y, both [out, in].
    """
    inputs = np.linalg.norm(W, p, axis=1) * np.linalg.norm(W, 2, axis=1)
    outputs = np.linalg.norm(W, p, axis=0) * np.linalg.norm(W, 2, axis=0)
    return (W / inputs[:, None]).T, (W / outputs[None, :]).T


def along(W: Matrix, p: float, u: Float[np.ndarray, "a"], v: Float[np.ndarray, "d"]) -> tuple[Matrix, Matrix]:
    """Return X and Y for the l_p score, along two unit vectors.

        X_:j = u / |W_j:|_p        Y_k: = v / |W_:k|_p

    Thesis: Lemma 6.3.9.  Holds if: |u|_2 = |v|_2 = 1.

    Args:
        W: weights [in, out].
        p: order of the norm.
        u: unit vector [a].
        v: unit vector [d].

    Returns:
        X [a, in] and Y [out, d].
    """
    return np.outer(u, 1 / np.linalg.norm(W, p, axis=1)), np.outer(1 / np.linalg.norm(W, p, axis=0), v)


def on_sets(W: Matrix, inputs: Bool[np.ndarray, "_ _"], outputs: Bool[np.ndarray, "_ _"]) -> tuple[Matrix, Matrix]:
    """Return X and Y for the score stochRIA, whose norms are over sets of tau weights.

        X_:j = 1(i in S_j) / (|W_j:S_j|_1 sqrt(tau))        Y_k: = 1(i in S_k) / (|W_S_k:k|_1 sqrt(tau))

    S_j is the set of tau outputs of input j, S_k the set of tau inputs of output k, and |W_j:S_j|_1 the l1 norm of the
    weights of input j in S_j.

    Thesis: Lemma 6.3.10.  Holds if: X has a = out rows and Y has d = in columns (erratum W12 in docs/errata.md).

    Args:
        W: weights [in, out].
        inputs: masks of the sets S_j, one in each row, [in, out].
        outputs: masks of the sets S_k, one in each column, [in, out].

    Returns:
        X and Y, both [out, in].
    """
    w = np.abs(W)
    X = inputs / ((w * inputs).sum(1) * np.sqrt(inputs.sum(1)))[:, None]
    return X.T, (outputs / ((w * outputs).sum(0) * np.sqrt(outputs.sum(0)))[None, :]).T


def at_one_weight(W: Matrix, norms: Float[np.ndarray, "i"], alpha: float, j: int, k: int) -> tuple[Matrix, Matrix]:
    """Return X and Y whose score equals RIA at the weight (j, k) and nowhere else.

        X_:j = |C_:j|_2^alpha / |W_j:|_1        Y_k: = |C_:j|_2^alpha / |W_:k|_1,   all other entries are 0

    Thesis: Lemma 6.3.6.  Differs (docs/errata.md): W7 (no X and Y have RIA as their score at all weights).

    Args:
        W: weights [in, out].
        norms: |C_:j|_2, the norms of the activations of each input, [in].
        alpha: exponent of the norms.
        j: input of the weight.
        k: output of the weight.

    Returns:
        X [1, in] and Y [out, 1].
    """
    X, Y = np.zeros((1, W.shape[0])), np.zeros((W.shape[1], 1))
    X[0, j] = norms[j] ** alpha / np.abs(W[j]).sum()
    Y[k, 0] = norms[j] ** alpha / np.abs(W[:, k]).sum()
    return X, Y
