"""Inner solvers for networks with local steps on the clients, for F = sum_i w_i F_i.

One iteration of the budget is one round in the cohort.  The methods of the thesis (Fig. 5.4, Sec. D.1.1, Sec. D.5.3)
are called as follows:

    FedSGD, LocalGD           fed_opt(steps, stepsize, optax.sgd(1.0))
    FedAdam (Sec. D.5.3)      fed_opt(steps, stepsize, optax.sgd(1.0), local=optax.scale_by_adam())
    FedAdam-Adam              fed_adam(steps, stepsize, rate, local=optax.scale_by_adam())
    FedAdam-AdaGrad           fed_adam(steps, stepsize, rate, local=optax.scale_by_rss())
    FedAdagrad-AdaGrad        fed_adagrad(steps, stepsize, rate, local=optax.scale_by_rss())
    Mime-Adam, MimeLite-Adam, FedSpeed, Fed-LAMB    mime, mime_lite, fed_speed, fed_lamb
    Adam, Apollo, OASIS       adaptive.adam, adaptive.apollo, adaptive.oasis

Gradients are of the full local objectives (the papers draw minibatches).  Solvers return the last point.  As in all
solvers, the gradient of F at the end of a round is computed to report the residual.  Clients have to send it only if a
tolerance needs it: `vectors_per_round` counts what a client sends.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from commjax.prox.solvers.adaptive import adam, apollo, check_fractions, oasis, repeat, transformed
from commjax.prox.solvers.base import (
    LocalOracle,
    Oracle,
    Result,
    Solver,
    Vector,
    check_positive,
    local_newton,
    locals_of,
    scaffnew,
)


def _work(cohort: LocalOracle, x: Vector, steps: Any, memory: Any, step: Callable) -> tuple[Array, Any]:
    """Apply `step(rows, grads, memory) -> (rows, memory)` `steps` times; every client starts at x."""
    rows = jnp.broadcast_to(x, (cohort.weights.shape[0], x.shape[0]))
    return jax.lax.fori_loop(
        0, steps, lambda _, carry: step(carry[0], cohort.value_and_grad(carry[0])[1], carry[1]), (rows, memory)
    )


def fed_opt(
    local_steps: Any,
    local_stepsize: Any,
    server: optax.GradientTransformation,
    local: optax.GradientTransformation | None = None,
) -> Solver:
    """FedOpt (Reddi et al. 2021): the mean of local steps is a pseudo-gradient for the server's optimizer.

        y_i <- y_i - local_stepsize local(grad F_i(y_i)),   local_steps times from y_i = x
        x <- x + server(x - sum_i w_i y_i)

    Thesis: Sec. D.5.3.
    Holds if: with local_steps > 1 it stops near, not at, the minimiser of F unless the F_i agree.
    Differs: no correction for the bias of local adaptivity (Wang et al. 2021).

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        server: optimizer of the server, which includes its learning rate; `optax.sgd(1.0)` is FedAvg.
        local: an elementwise `optax.scale_by_...` whose state is initialised in each round.  None means plain gradient
            steps.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize)
    local = local or optax.identity()

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def step(rows, grads, state):
            direction, state = transformed(local, grads, state, rows)
            return rows - stepsize * direction, state

        def update(here, state, number):
            fresh = local.init(jnp.broadcast_to(here.x, (cohort.weights.shape[0], x.shape[0])))
            rows, _ = _work(cohort, here.x, local_steps, fresh, step)
            move, state = transformed(server, here.x - cohort.weights @ rows, state, here.x)
            return here.x + move, state

        return repeat(oracle, x, budget, tolerance, server.init(x), update)

    return solve


class _Moments(NamedTuple):
    count: Array
    first: PyTree
    second: PyTree


EPSILON = ("outside", "inside", "uncorrected")


def _adaptive(rate, b1, decay, weight, eps, bias_correction, start, epsilon) -> optax.GradientTransformation:
    """Optax optimizer with v <- decay v + weight g^2; `fed_adam` has the other formulas.

    Optax itself has only bias_correction with epsilon outside or inside.
    """
    if epsilon not in EPSILON:
        raise ValueError(f"epsilon={epsilon!r}; allowed: one of {', '.join(EPSILON)}")
    check_positive(learning_rate=rate, eps=eps)
    start = eps**2 if start is None else start

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _Moments(jnp.zeros((), jnp.int32), zeros, jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params))

    def update(updates, state, params=None):
        count = state.count + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: decay * v + weight * g**2, state.second, updates)

        def move(m, v):
            t = count.astype(m.dtype)
            one, two = (1 - b1**t, 1 - decay**t) if bias_correction else (1.0, 1.0)
            if epsilon == "inside":
                root = jnp.sqrt(v / two + eps)
            else:
                root = jnp.sqrt(v / two) + (eps if epsilon == "outside" else eps / jnp.sqrt(two))
            return -jnp.asarray(rate, m.dtype) * (m / one) / root

        return jax.tree.map(move, first, second), _Moments(count, first, second)

    return optax.GradientTransformation(init, update)


def fed_adam(
    local_steps: Any,
    local_stepsize: Any,
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    *,
    local: optax.GradientTransformation | None = None,
    bias_correction: bool = False,
    initial_accumulator: float | None = None,
    epsilon: str = "outside",
) -> Solver:
    """FedAdam (Reddi et al. 2021): `fed_opt` with Adam on the server, D = x - sum_i w_i y_i, tau = eps.

        m <- b1 m + (1 - b1) D        v <- b2 v + (1 - b2) D^2        x <- x - learning_rate m / (sqrt(v) + tau)

    m starts at 0 and v at tau^2.  Public packages differ in the last three options.  With bias_correction=True and
    initial_accumulator=0 the server is `optax.adam`.

    Thesis: FedAdam-Adam and FedAdam-AdaGrad through `local` (see the module).
    Differs: without the corrections of Wang et al. (2021) for local adaptive steps, which Sec. D.1.1 mentions.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        learning_rate: learning rate of the server.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: tau.
        local: see `fed_opt`.
        bias_correction: whether to use m / (1 - b1^t) and v / (1 - b2^t).
        initial_accumulator: the initial v; None means tau^2.
        epsilon: the denominator: "outside", sqrt(v) + tau; "inside", sqrt(v + tau); both with the corrected v; or
            "uncorrected", (sqrt(v) + tau) / sqrt(1 - b2^t).

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_fractions(b1=b1, b2=b2)
    server = _adaptive(learning_rate, b1, b2, 1 - b2, eps, bias_correction, initial_accumulator, epsilon)
    return fed_opt(local_steps, local_stepsize, server, local)


def fed_adagrad(
    local_steps: Any,
    local_stepsize: Any,
    learning_rate: Any,
    b1: float = 0.0,
    eps: float = 1e-3,
    *,
    local: optax.GradientTransformation | None = None,
    initial_accumulator: float | None = None,
    epsilon: str = "outside",
) -> Solver:
    """FedAdagrad (Reddi et al. 2021): `fed_adam` with v <- v + D^2.

    Thesis: FedAdagrad-AdaGrad (Sec. D.1.1) with local=optax.scale_by_rss().  FedAdam-AdaGrad (Fig. 5.4) is `fed_adam`
    with that `local`.
    Differs: without the local and global corrections of Wang et al. (2021), which Sec. D.1.1 mentions.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        learning_rate: learning rate of the server.
        b1: decay of the first moment, in [0, 1).
        eps: tau.
        local: see `fed_opt`.
        initial_accumulator: the initial v; None means tau^2.
        epsilon: see `fed_adam`.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_fractions(b1=b1)
    server = _adaptive(learning_rate, b1, 1.0, 1.0, eps, False, initial_accumulator, epsilon)
    return fed_opt(local_steps, local_stepsize, server, local)


def _mime(correct: bool, local_steps, local_stepsize, b1, b2, eps, initial_accumulator) -> Solver:
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize, eps=eps)
    check_fractions(b1=b1, b2=b2)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def update(here, memory, number):
            m, v = memory
            if initial_accumulator is None:
                v = jnp.where(number == 0, here.grad**2, v)
            anchor = jnp.broadcast_to(here.x, (cohort.weights.shape[0], x.shape[0]))
            shift = here.grad[None] - cohort.value_and_grad(anchor)[1] if correct else jnp.zeros_like(anchor)

            def step(rows, grads, _):
                direction = (b1 * m[None] + (1 - b1) * (grads + shift)) / (jnp.sqrt(v) + eps)[None]
                return rows - stepsize * direction, ()

            rows, _ = _work(cohort, here.x, local_steps, (), step)
            return cohort.weights @ rows, (b1 * m + (1 - b1) * here.grad, b2 * v + (1 - b2) * here.grad**2)

        start = jnp.full_like(x, 0.0 if initial_accumulator is None else initial_accumulator)
        return repeat(oracle, x, budget, tolerance, (jnp.zeros_like(x), start), update, evaluations=1 + correct)

    return solve


def mime(
    local_steps: Any,
    local_stepsize: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float | None = None,
) -> Solver:
    """Mime with Adam (Karimireddy et al. 2021): local steps with frozen server statistics and an SVRG correction.

        c = grad F(x),   then local_steps times from y_i = x:
        y_i <- y_i - local_stepsize (b1 m + (1 - b1) (grad F_i(y_i) - grad F_i(x) + c)) / (sqrt(v) + eps)
        m <- b1 m + (1 - b1) c        v <- b2 v + (1 - b2) c^2        x <- sum_i w_i y_i

    The clients need c before the local steps, so a round is two aggregations and counts as two evaluations.

    Thesis: Mime-Adam, Fig. 5.4.
    Differs: v_0 = grad F(x_0)^2, known from the first evaluation, because a frozen v = 0 divides by eps; a number in
    `initial_accumulator` is v_0.  No bias correction.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: term that keeps the denominator away from 0.
        initial_accumulator: the initial v; None means grad F(x_0)^2.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    return _mime(True, local_steps, local_stepsize, b1, b2, eps, initial_accumulator)


def mime_lite(
    local_steps: Any,
    local_stepsize: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float | None = None,
) -> Solver:
    """MimeLite with Adam: `mime` without the SVRG correction, with grad F_i(y_i) alone in the local steps.

    c is needed only after the local steps.  Hence a client sends grad F_i(x) together with y_i: one evaluation per
    round and two vectors (`vectors_per_round`).

    Thesis: MimeLite-Adam, Sec. D.5.3.
    Holds if: with local_steps > 1 it stops near, not at, the minimiser of F unless the F_i agree; `mime` has no such
    bias.
    Differs: see `mime`.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: term that keeps the denominator away from 0.
        initial_accumulator: the initial v; None means grad F(x_0)^2.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    return _mime(False, local_steps, local_stepsize, b1, b2, eps, initial_accumulator)


def fed_speed(local_steps: Any, local_stepsize: Any, lam: Any, rho: Any = 0.1, alpha: Any = 1.0) -> Solver:
    """FedSpeed (Sun et al. 2023): prox-correction and perturbed gradients.

        g = grad F_i(y_i),   p = grad F_i(y_i + rho g),   q = (1 - alpha) g + alpha p
        y_i <- y_i - local_stepsize (q - h_i + (y_i - x) / lam),   local_steps times from y_i = x
        h_i <- h_i - (y_i - x) / lam        x <- sum_i w_i (y_i - lam h_i)

    h_i starts at 0 and stays with the client for all rounds of the cohort.

    Thesis: FedSpeed, Fig. 5.4 and Sec. D.1.1.
    Holds if: local_stepsize (L (1 + alpha rho L) + 1/lam) <= 1.  The limit has sum_i w_i q_i = 0: the minimiser of F if
    alpha rho = 0 or the F_i agree, else one near it.
    Differs: the perturbation is rho g, as in the paper's algorithm; its public code takes rho g / |g|.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        lam: inverse weight of the prox term, positive.
        rho: size of the perturbation, at least 0.
        alpha: share of the perturbed gradient, in [0, 1].

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize, lam=lam)
    if isinstance(rho, int | float) and not rho >= 0:
        raise ValueError(f"rho={rho}; allowed: at least 0")
    if isinstance(alpha, int | float) and not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}; allowed: 0 <= alpha <= 1")

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize, penalty, radius, mix = (jnp.asarray(number, x.dtype) for number in (local_stepsize, lam, rho, alpha))

        def update(here, shifts, number):
            def step(rows, grads, _):
                perturbed = cohort.value_and_grad(rows + radius * grads)[1]
                quasi = (1 - mix) * grads + mix * perturbed
                return rows - stepsize * (quasi - shifts + (rows - here.x[None]) / penalty), ()

            rows, _ = _work(cohort, here.x, local_steps, (), step)
            shifts = shifts - (rows - here.x[None]) / penalty
            return cohort.weights @ (rows - penalty * shifts), shifts

        return repeat(oracle, x, budget, tolerance, jnp.zeros((cohort.weights.shape[0], x.shape[0]), x.dtype), update)

    return solve


def fed_lamb(
    local_steps: Any,
    local_stepsize: Any,
    unravel: Callable[[Vector], PyTree],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Solver:
    """Fed-LAMB (Karimi et al. 2022): local steps whose length is set layer by layer (`optax.scale_by_trust_ratio`).

        m_i <- b1 m_i + (1 - b1) g        v_i <- b2 v_i + (1 - b2) g^2,   g = grad F_i(y_i),   v_i = u and y_i = x at
        first p = m_i / (sqrt(u) + eps) + weight_decay y_i y_i <- y_i - local_stepsize p |y_i| / |p|,   one layer (leaf
        of unravel(y_i)) at a time;   local_steps times x <- sum_i w_i y_i        u <- max(u, sum_i w_i v_i),   u = eps
        at first

    m_i starts at 0 and stays with the client for all rounds of the cohort.  A client sends y_i and v_i: two vectors.  A
    layer at 0 takes the step local_stepsize p.

    Thesis: Fed-LAMB, Sec. D.1.1.
    Holds if: |step| = local_stepsize |y| a layer whatever the gradient, so it ends at about that distance.
    Differs: the scaling phi(|y|) is |y|, and v_i starts from u, where the thesis says nothing; gradients are of all
    rows, so the paper's averaging over minibatches is not there.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        unravel: flat vector [d] -> pytree whose leaves are the layers.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: term that keeps the denominator away from 0.
        weight_decay: weight of y_i in the direction p.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize, eps=eps)
    check_fractions(b1=b1, b2=b2)
    trust = optax.scale_by_trust_ratio()

    def scaled(direction, y):
        layers = unravel(y)
        return ravel_pytree(transformed(trust, unravel(direction), trust.init(layers), layers)[0])[0]

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def update(here, memory, number):
            first, shared = memory

            def step(rows, grads, moments):
                m, v = b1 * moments[0] + (1 - b1) * grads, b2 * moments[1] + (1 - b2) * grads**2
                direction = m / (jnp.sqrt(shared) + eps)[None] + weight_decay * rows
                return rows - stepsize * jax.vmap(scaled)(direction, rows), (m, v)

            second = jnp.broadcast_to(shared, first.shape)
            rows, (first, second) = _work(cohort, here.x, local_steps, (first, second), step)
            return cohort.weights @ rows, (first, jnp.maximum(shared, cohort.weights @ second))

        memory = (jnp.zeros((cohort.weights.shape[0], x.shape[0]), x.dtype), jnp.full_like(x, eps))
        return repeat(oracle, x, budget, tolerance, memory, update)

    return solve


# Vectors that a client sends per aggregation: without and with a gradient that only measures the residual.
_VECTORS = {
    local_newton: (2, 2),  # model and gradient at x, together
    scaffnew: (1, 2),
    adam: (1, 1),
    fed_opt: (1, 2),
    fed_adam: (1, 2),
    fed_adagrad: (1, 2),
    mime: (1, 1),  # two aggregations per round: first gradients, then models
    mime_lite: (2, 2),  # model and gradient at the server point, together
    fed_speed: (1, 2),
    fed_lamb: (2, 3),  # model and second moment
    apollo: (1, 1),
    oasis: (2, 2),  # gradient and z * (H z)
}


def vectors_per_round(solver: Callable, residual: bool = False) -> int:
    """Return how many vectors of dimension d one client sends for each of `Result.evaluations`.

    Args:
        solver: a factory of this module or of `adaptive`, or `local_newton` or `scaffnew`.
        residual: whether a tolerance may stop the run.  Methods that average models then send a gradient beside the
            model.

    Returns:
        The number of vectors.

    >>> vectors_per_round(fed_adam), vectors_per_round(fed_adam, residual=True), vectors_per_round(mime_lite)
    (1, 2, 2)
    """
    if solver not in _VECTORS:
        raise ValueError(
            f"solver={solver}; allowed: {', '.join(one.__name__ for one in _VECTORS)} "
            "of prox.solvers, prox.federated and prox.adaptive"
        )
    return _VECTORS[solver][residual]


def vectors_down(solver: Callable) -> int:
    """Return how many vectors of dimension d one client receives for each of `Result.evaluations`.

    These are x and what else the local steps read: MimeLite's c (the client keeps its moments) and Fed-LAMB's u.

    Args:
        solver: see `vectors_per_round`.

    Returns:
        The number of vectors.

    >>> vectors_down(fed_adam), vectors_down(mime_lite), vectors_down(fed_lamb)
    (1, 2, 2)
    """
    vectors_per_round(solver)  # raises an error for an unknown solver
    return 2 if solver in (mime_lite, fed_lamb) else 1
