"""Logistic regression with a convex or nonconvex regulariser: the losses in JAX, constants and optimum on the host."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from commjax.data import stacked
from commjax.data.libsvm import Dataset
from commjax.data.partition import Rows
from commjax.data.stacked import ClientData, Columns
from commjax.problems.constants import Optimum, Smoothness, smoothness


def _log1p(s: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute log(1 + s) = 2 artanh(u), u = s / (2 + s) <= 1/3, for 0 <= s <= 1, by its series up to rounding."""
    u = s / (2 + s)
    square, series = u * u, jnp.zeros_like(u)
    for k in reversed(range(16)):
        series = series * square + 1 / (2 * k + 1)
    return 2 * u * series


@jax.custom_jvp
def softplus(z: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute log(1 + exp(z)), for float64 on a CPU.

    In float64, `jax.nn.softplus` and its derivative call a scalar logarithm for every number, which is slow on a CPU.
    In float32, `jax.nn.softplus` is faster than this function.

    Args:
        z: The numbers.

    Returns:
        log(1 + exp(z)), elementwise.

    >>> x = jnp.asarray(-800.0)
    >>> print(f"{softplus(jnp.zeros(())):.4f} {softplus(x):.1f} {jax.grad(softplus)(jnp.zeros(())):.1f}")
    0.6931 0.0 0.5
    """
    return jnp.maximum(z, 0) + _log1p(jnp.exp(-jnp.abs(z)))


@softplus.defjvp
def _softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (dz,) = primals, tangents
    # The derivative 1 / (1 + exp(-z)) is computed from exp(-|z|) too, so that it does not overflow.
    small = jnp.exp(-jnp.abs(z))
    return softplus(z), jnp.where(z >= 0, 1, small) / (1 + small) * dz


def _fit(params: Float[Array, "d"], data: ClientData | Columns) -> Float[Array, ""]:
    margins = data.labels * data.times(params)
    log1p_exp = softplus if margins.dtype == jnp.float64 else jax.nn.softplus
    return jnp.vdot(data.weights, log1p_exp(-margins))


def loss(params: Float[Array, "d"], data: ClientData | Columns, mu: ArrayLike) -> Float[Array, ""]:
    """Compute the logistic loss of one client with an L2 regulariser.

        f_i(x) = (1/N_i) sum_j log(1 + exp(-b_ij <a_ij, x>)) + mu/2 |x|^2

    Thesis: Sec. A.3.1.
    f_i is convex; ``constants`` computes its constants of smoothness and strong convexity.

    Args:
        params: The point x.
        data: The rows (a_ij, b_ij) of one client, with weights 1/N_i.
        mu: The weight of the regulariser.

    Returns:
        f_i(x).

    >>> row = ClientData(jnp.ones((1, 2)), jnp.ones(1), jnp.ones(1))
    >>> print(f"{loss(jnp.zeros(2), row, 0.1):.4f}")
    0.6931
    """
    half_mu = jnp.asarray(mu, params.dtype) / 2
    return _fit(params, data) + half_mu * jnp.sum(params**2)


def nonconvex_loss(params: Float[Array, "d"], data: ClientData | Columns, lam: ArrayLike) -> Float[Array, ""]:
    """Compute the logistic loss of one client with a nonconvex regulariser.

        f_i(x) = (1/N_i) sum_j log(1 + exp(-b_ij <a_ij, x>)) + lam sum_k x_k^2 / (1 + x_k^2)

    Thesis: Sec. A.3.3.
    Differs (docs/errata.md): E12 (the regulariser is 2 lam-smooth, not lam).

    Args:
        params: The point x.
        data: The rows (a_ij, b_ij) of one client, with weights 1/N_i.
        lam: The weight of the regulariser.

    Returns:
        f_i(x).

    >>> row = ClientData(jnp.zeros((1, 2)), jnp.ones(1), jnp.ones(1))
    >>> print(f"{nonconvex_loss(jnp.ones(2), row, 0.5) - jnp.log(2):.4f}")
    0.5000
    """
    square = params**2
    return _fit(params, data) + jnp.asarray(lam, params.dtype) * jnp.sum(square / (1 + square))


def _lambda_max(A: np.ndarray) -> float:
    """Largest eigenvalue of A^T A, from the smaller of the two Gram matrices."""
    gram = A @ A.T if len(A) < A.shape[1] else A.T @ A
    return float(np.linalg.eigvalsh(gram)[-1])


def _curvatures(dataset: Dataset, rows: Rows) -> np.ndarray:
    """lambda_max(A_i^T A_i) / (4 N_i) of every client."""
    stacked.check(dataset, rows)
    return np.array([_lambda_max(dataset.features[ids]) / (4 * len(ids)) for ids in rows])


def _with_regulariser(dataset: Dataset, rows: Rows, curvature: float, mu: float) -> Smoothness:
    L_i = _curvatures(dataset, rows)
    weights = stacked.row_weights(rows, len(dataset.features))
    L = _lambda_max(np.sqrt(weights)[:, None] * dataset.features) / 4
    return smoothness(L_i + curvature, L + curvature, mu)


def _check_weight(name: str, weight: float, allow_zero: bool = True) -> None:
    if not (np.isfinite(weight) and (weight > 0 or (allow_zero and weight == 0))):
        raise ValueError(f"{name}={weight}; allowed: finite and {'>= 0' if allow_zero else '> 0'}")


def constants(dataset: Dataset, rows: Rows, mu: float) -> Smoothness:
    """Compute the tight constants of ``loss``.

        L_i = lambda_max(A_i^T A_i) / (4 N_i) + mu
        L   = lambda_max((1/n) sum_i A_i^T A_i / N_i) / 4 + mu

    A_i [N_i, d] are the features of client i's N_i rows.

    Differs (docs/errata.md): E3 (the text's L_i is ``trace_bound``), E2 (Table A.2 used ``reproduce_tab10``).

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        mu: The weight of the regulariser.

    Returns:
        The constants.

    >>> two = Dataset(np.diag([2.0, 4.0]), np.array([-1.0, 1.0]), "two")
    >>> L, L_tilde, L_max, mu, L_i = constants(two, [np.array([0]), np.array([1])], mu=0.5)
    >>> print(f"{L:.4f} {L_tilde:.4f} {L_max:.4f} {mu}", L_i)
    2.5000 3.3541 4.5000 0.5 [1.5 4.5]
    """
    _check_weight("mu", mu)
    return _with_regulariser(dataset, rows, mu, mu)


def nonconvex_constants(dataset: Dataset, rows: Rows, lam: float) -> Smoothness:
    """Compute the constants of ``nonconvex_loss``: those of the logistic part plus 2 lam, and mu = 0.

    Differs (docs/errata.md): E12 (2 lam, not lam).

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        lam: The weight of the regulariser.

    Returns:
        The constants.

    >>> two = Dataset(np.diag([2.0, 4.0]), np.array([-1.0, 1.0]), "two")
    >>> print(f"{nonconvex_constants(two, [np.array([0, 1])], lam=0.5).L:.4f}")
    3.0000
    """
    _check_weight("lam", lam)
    return _with_regulariser(dataset, rows, 2 * lam, 0.0)


def reproduce_tab10(dataset: Dataset, rows: Rows, mu: float = 0.1) -> Smoothness:
    """Compute the constants behind the stepsizes printed in the thesis: 2 mu instead of mu, and L over the pooled rows.

    Thesis: Table A.2, n = 1000, ``rows = blocks(N, n, remainder="last", overlap=xi)``. The table's numbers for xi = 2
    leave out the last rows: N is ``n * (N // n)``. This changes L_tilde by less than 0.1 %.
    Differs (docs/errata.md): E2 (these are not the constants of ``loss``). Use ``constants`` for anything else.

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        mu: The weight of the regulariser.

    Returns:
        The constants. L <= L_tilde need not hold.

    >>> two = Dataset(np.diag([2.0, 4.0]), np.array([-1.0, 1.0]), "two")
    >>> reproduce_tab10(two, [np.array([0]), np.array([1])], mu=0.5).L_i
    array([2., 5.])
    """
    _check_weight("mu", mu)
    pooled = smoothness(_curvatures(dataset, rows) + 2 * mu, mu=mu)
    # Pooling weighs clients by their number of rows, so L <= L_tilde need not hold and is not checked.
    return pooled._replace(L=_lambda_max(dataset.features) / (4 * len(dataset.features)) + 2 * mu)


def trace_bound(dataset: Dataset, rows: Rows, mu: float) -> Smoothness:
    """Compute the constants by the formula printed in the thesis, a loose upper bound.

        L_i = mu + (1/(4 N_i)) sum_j |a_ij|^2,   L = L_tilde

    Thesis: Sec. A.3.1, Sec. 3.3.1, Sec. 5.4.
    Differs (docs/errata.md): E1 (L_tilde has the factor 1/n), E3 (1.5 to 4.4 times ``constants`` on the thesis's data).

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        mu: The weight of the regulariser.

    Returns:
        The constants.

    >>> two = Dataset(np.diag([2.0, 4.0]), np.array([-1.0, 1.0]), "two")
    >>> trace_bound(two, [np.array([0, 1])], mu=0.5).L
    3.0
    """
    _check_weight("mu", mu)
    stacked.check(dataset, rows)
    norms = np.sum(dataset.features**2, axis=1)
    return smoothness(np.array([norms[ids].mean() / 4 + mu for ids in rows]), mu=mu)


def optimum(dataset: Dataset, rows: Rows, mu: float, tol: float = 1e-12, max_iterations: int = 100) -> Optimum:
    """Minimise f = (1/n) sum_i f_i of ``loss`` to |grad f| <= tol, by a damped Newton method on the host.

    Holds if: mu > 0. Raises a RuntimeError if the tolerance is not reached within `max_iterations` or in float64.

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        mu: The weight of the regulariser.
        tol: The tolerance.
        max_iterations: The largest number of Newton steps.

    Returns:
        The optimum.

    >>> two = Dataset(np.array([[1.0], [1.0]]), np.array([-1.0, 1.0]), "two")
    >>> optimum(two, [np.array([0, 1])], mu=0.1).params
    array([0.])
    """
    _check_weight("mu", mu, allow_zero=False)
    stacked.check(dataset, rows)
    weights = stacked.row_weights(rows, len(dataset.features))
    used = weights > 0
    A = dataset.labels[used, None] * dataset.features[used]
    d = A.shape[1]
    objective = _Objective(A, np.zeros(len(A)), weights[used], mu, np.zeros(d), 0.0)
    return _newton(objective, tol, max_iterations)


def flix_optimum(
    dataset: Dataset,
    rows: Rows,
    mu: float,
    alpha: ArrayLike,
    anchors: Float[np.ndarray, "n d"],
    *,
    tol: float = 1e-12,
    max_iterations: int = 100,
) -> Optimum:
    """Minimise the FLIX objective of ``loss``, by a damped Newton method on the host.

        (1/n) sum_i f_i(alpha_i x + (1 - alpha_i) x_i*)

    f_i is ``loss`` of client i. The method stops at |grad| <= tol max_i alpha_i, because the gradient of a term has the
    factor alpha_i.

    Holds if: mu > 0 and some alpha_i > 0.

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        mu: The weight of the regulariser.
        alpha: The personalization factors alpha_i in [0, 1], one number or one per client.
        anchors: The local minimisers x_i*, one a row.
        tol: The tolerance, relative to max_i alpha_i.
        max_iterations: The largest number of Newton steps.

    Returns:
        The optimum x.

    >>> two = Dataset(np.array([[1.0], [1.0]]), np.array([-1.0, 1.0]), "two")
    >>> flix_optimum(two, [np.array([0, 1])], 0.1, 0.5, np.zeros((1, 1))).params
    array([0.])
    """
    _check_weight("mu", mu, allow_zero=False)
    stacked.check(dataset, rows)
    n = len(rows)
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), (n,))
    if not (np.all((alphas >= 0) & (alphas <= 1)) and alphas.max() > 0):
        raise ValueError(f"alpha={alpha}; allowed: in [0, 1], and at least one above 0")
    fixed = (1 - alphas)[:, None] * anchors
    signed = [dataset.labels[ids, None] * dataset.features[ids] for ids in rows]
    A = np.concatenate([weight * part for weight, part in zip(alphas, signed, strict=True)])
    offset = np.concatenate([part @ anchor for part, anchor in zip(signed, fixed, strict=True)])
    weights = np.repeat([1 / (n * len(ids)) for ids in rows], [len(ids) for ids in rows])
    linear, constant = mu * np.mean(alphas[:, None] * fixed, axis=0), mu / 2 * np.sum(fixed**2) / n
    ridge = mu * float(np.mean(alphas**2))
    objective = _Objective(A, offset, weights, ridge, linear, float(constant))
    return _newton(objective, tol * alphas.max(), max_iterations)


class _Objective(NamedTuple):
    """sum_r weights_r log(1 + exp(-(A x + offset)_r)) + ridge/2 |x|^2 + <linear, x> + constant."""

    A: Float[np.ndarray, "N d"]
    offset: Float[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]
    ridge: float
    linear: Float[np.ndarray, "d"]
    constant: float

    def value(self, x: Float[np.ndarray, "d"]) -> float:
        """Return the objective at x."""
        fit = self.weights @ np.logaddexp(0, -(self.A @ x + self.offset))
        return float(fit + self.ridge / 2 * x @ x + self.linear @ x + self.constant)


def _newton(objective: _Objective, tol: float, max_iterations: int) -> Optimum:
    """Minimise the objective by a damped Newton method."""
    A, offset, weights, ridge, linear, _ = objective
    value = objective.value
    x, norm = np.zeros(A.shape[1]), np.inf
    for _ in range(max_iterations):
        margin = A @ x + offset
        wrong = np.exp(-np.logaddexp(0, margin))  # the probability given to the wrong label
        gradient = ridge * x + linear - A.T @ (weights * wrong)
        norm = float(np.linalg.norm(gradient))
        if norm <= tol:
            return Optimum(x, value(x), norm)
        hessian = (A.T * (weights * wrong * (1 - wrong))) @ A
        hessian[np.diag_indices_from(hessian)] += ridge
        direction = -np.linalg.solve(hessian, gradient)
        # Near the optimum the decrease is smaller than the rounding error. The tolerance lets the full step pass.
        current, slope, rounding = value(x), gradient @ direction, 1e-14
        step = 1.0
        while step > 1e-10 and value(x + step * direction) > current + step * slope / 4 + rounding * abs(current):
            step /= 2
        x = x + step * direction
    raise RuntimeError(f"|grad f| = {norm:.3g} after {max_iterations} Newton steps; asked for tol={tol:g}")
