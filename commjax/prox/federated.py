"""Inner solvers for networks: adaptive and federated methods on F = sum_i w_i F_i, with the interface of `solvers`.

One iteration of the budget is one round in the cohort.  The names of the thesis (L2328, L4673, L5138) and what to call:

    FedSGD, LocalGD       fed_opt(steps, stepsize, optax.sgd(1.0))
    FedAdam (L5138)       fed_opt(steps, stepsize, optax.sgd(1.0), local=optax.scale_by_adam())
    FedAdam-Adam          fed_adam(steps, stepsize, rate, local=optax.scale_by_adam())
    FedAdam-AdaGrad       fed_adam(steps, stepsize, rate, local=optax.scale_by_rss())
    FedAdagrad-AdaGrad    fed_adagrad(steps, stepsize, rate, local=optax.scale_by_rss())
    Mime-Adam, MimeLite-Adam, FedSpeed, Fed-LAMB, Apollo, OASIS    mime, mime_lite, fed_speed, fed_lamb, apollo, oasis

Gradients are of the full local objectives (the papers draw minibatches).  As everywhere in `solvers`, the gradient of F at the end
of a round is computed to report the residual; what a client sends is in `vectors_per_round`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from commjax.prox.solvers import LocalOracle, Oracle, Point, Result, Solver, Vector, evaluate, iterate, locals_of


def _positive(**values: Any) -> None:
    """Numbers are looked at; traced values cannot be."""
    for name, value in values.items():
        if isinstance(value, int | float) and not value > 0:
            raise ValueError(f"{name}={value}; allowed: positive")


def _fractions(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 <= value < 1:
            raise ValueError(f"{name}={value}; allowed: 0 <= {name} < 1")


def _work(cohort: LocalOracle, x: Vector, steps: Any, memory: Any, step: Callable) -> tuple[Array, Any]:
    """`step(rows, grads, memory) -> (rows, memory)`, `steps` times; every client starts at x."""
    rows = jnp.broadcast_to(x, (cohort.weights.shape[0], x.shape[0]))
    return jax.lax.fori_loop(
        0, steps, lambda _, carry: step(carry[0], cohort.value_and_grad(carry[0])[1], carry[1]), (rows, memory)
    )


def _repeat(
    oracle: Oracle, x: Vector, budget: Any, tolerance: Any, memory: Any, update: Callable, evaluations: int = 1
) -> Result:
    """`update(point, memory, number) -> (x, memory)` is a round, which nothing but a value that is not finite can break."""

    def advance(here, memory, number):
        there, memory = update(here, memory, number)
        return evaluate(oracle, there), memory, evaluations, False

    return iterate(oracle, x, budget, tolerance, memory, advance)


def _transformed(
    transform: optax.GradientTransformation, updates: PyTree, state: Any, params: PyTree
) -> tuple[PyTree, Any]:
    """Optax counts in integers that it mixes with floats: for it alone promotion is not strict, and the updates keep their dtype."""
    with jax.numpy_dtype_promotion("standard"):
        moved, state = transform.update(updates, state, params)
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), moved, updates), state


def adam(learning_rate: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Solver:
    """Adam on F (Kingma and Ba 2015; `optax.scale_by_adam`); a round is one gradient of F.

        m <- b1 m + (1 - b1) grad F(x)        v <- b2 v + (1 - b2) grad F(x)^2
        x <- x - learning_rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Thesis: the solver of its networks (L5059).
    Holds if: a constant rate stops at a distance of about learning_rate a coordinate.

    >>> F = Oracle(lambda x: (jnp.vdot(x, x) / 2, x))
    >>> result = adam(0.1)(F, jnp.ones(2), 20, 0.0)
    >>> int(result.iterations), int(result.evaluations), bool(result.residual < 0.1)
    (20, 21, True)
    """
    _positive(learning_rate=learning_rate)
    _fractions(b1=b1, b2=b2)
    transform = optax.scale_by_adam(b1, b2, eps)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def update(here, state, number):
            direction, state = _transformed(transform, here.grad, state, here.x)
            return here.x - jnp.asarray(learning_rate, x.dtype) * direction, state

        return _repeat(oracle, x, budget, tolerance, transform.init(x), update)

    return solve


def fed_opt(
    local_steps: Any,
    local_stepsize: Any,
    server: optax.GradientTransformation,
    local: optax.GradientTransformation | None = None,
) -> Solver:
    """FedOpt (Reddi et al. 2021): local steps on each F_i, their mean is a pseudo-gradient for the server's optimizer.

        y_i <- y_i - local_stepsize local(grad F_i(y_i)),   local_steps times from y_i = x
        x <- x + server(x - sum_i w_i y_i)

    `server` has its rate inside (`optax.sgd(1.0)` is FedAvg); `local` is an elementwise `optax.scale_by_...` whose state starts
    afresh in each round (None: plain gradient steps).

    Thesis: L5138.
    Holds if: with local_steps > 1 it stops near, not at, the minimiser of F unless the F_i agree.
    Differs: no correction for the bias of local adaptivity (Wang et al. 2021).
    """
    _positive(local_steps=local_steps, local_stepsize=local_stepsize)
    local = local or optax.identity()

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def step(rows, grads, state):
            direction, state = _transformed(local, grads, state, rows)
            return rows - stepsize * direction, state

        def update(here, state, number):
            fresh = local.init(jnp.broadcast_to(here.x, (cohort.weights.shape[0], x.shape[0])))
            rows, _ = _work(cohort, here.x, local_steps, fresh, step)
            move, state = _transformed(server, here.x - cohort.weights @ rows, state, here.x)
            return here.x + move, state

        return _repeat(oracle, x, budget, tolerance, server.init(x), update)

    return solve


class _Moments(NamedTuple):
    count: Array
    first: PyTree
    second: PyTree


EPSILON = ("outside", "inside", "uncorrected")


def _adaptive(rate, b1, decay, weight, eps, bias_correction, start, epsilon) -> optax.GradientTransformation:
    """v <- decay v + weight g^2; the rest is in `fed_adam`.  Optax has only bias_correction with epsilon outside or inside."""
    if epsilon not in EPSILON:
        raise ValueError(f"epsilon={epsilon!r}; allowed: one of {', '.join(EPSILON)}")
    _positive(learning_rate=rate, eps=eps)
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
    """FedAdam (Reddi et al. 2021): `fed_opt` with Adam at the server, D = x - sum_i w_i y_i, tau = eps, m_0 = 0, v_0 = tau^2.

        m <- b1 m + (1 - b1) D        v <- b2 v + (1 - b2) D^2        x <- x - learning_rate m / (sqrt(v) + tau)

    Public packages differ in three options: `bias_correction` (m / (1 - b1^t), v / (1 - b2^t)), `initial_accumulator` (v_0) and
    `epsilon`: "outside" sqrt(v) + tau, "inside" sqrt(v + tau), both of the corrected v, or "uncorrected", (sqrt(v) + tau) /
    sqrt(1 - b2^t).  With bias_correction=True, initial_accumulator=0 the server is `optax.adam`.

    Thesis: FedAdam-Adam and FedAdam-AdaGrad through `local` (see the module).
    """
    _fractions(b1=b1, b2=b2)
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
    """FedAdagrad (Reddi et al. 2021): as `fed_adam`, with v <- v + D^2.

    Thesis: FedAdagrad-AdaGrad (L4673) with local=optax.scale_by_rss().  FedAdam-AdaGrad (L2329) is `fed_adam` with that `local`.
    """
    _fractions(b1=b1)
    server = _adaptive(learning_rate, b1, 1.0, 1.0, eps, False, initial_accumulator, epsilon)
    return fed_opt(local_steps, local_stepsize, server, local)


def _mime(correct: bool, local_steps, local_stepsize, b1, b2, eps, initial_accumulator) -> Solver:
    _positive(local_steps=local_steps, local_stepsize=local_stepsize, eps=eps)
    _fractions(b1=b1, b2=b2)

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
        return _repeat(oracle, x, budget, tolerance, (jnp.zeros_like(x), start), update, evaluations=1 + correct)

    return solve


def mime(
    local_steps: Any,
    local_stepsize: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float | None = None,
) -> Solver:
    """Mime with Adam (Karimireddy et al. 2021): local steps with the server's statistics frozen, corrected as in SVRG.

        c = grad F(x),   then local_steps times from y_i = x:
        y_i <- y_i - local_stepsize (b1 m + (1 - b1) (grad F_i(y_i) - grad F_i(x) + c)) / (sqrt(v) + eps)
        m <- b1 m + (1 - b1) c        v <- b2 v + (1 - b2) c^2        x <- sum_i w_i y_i

    c has to be known before the local steps: a round is two aggregations, and counts as two evaluations.

    Thesis: Mime-Adam (L2328).
    Differs: v_0 = grad F(x_0)^2, known from the first evaluation, because a frozen v = 0 divides by eps; a number in
    `initial_accumulator` is v_0.  No bias correction.
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
    """MimeLite with Adam: `mime` with grad F_i(y_i) alone in the local steps.

    c is needed only afterwards, so grad F_i(x) travels with y_i: one evaluation a round, two vectors (`vectors_per_round`).

    Thesis: MimeLite-Adam (L5138).
    Holds if: with local_steps > 1 it stops near, not at, the minimiser of F unless the F_i agree; `mime` has no such bias.
    Differs: see `mime`.
    """
    return _mime(False, local_steps, local_stepsize, b1, b2, eps, initial_accumulator)


def fed_speed(local_steps: Any, local_stepsize: Any, lam: Any, rho: Any = 0.1, alpha: Any = 1.0) -> Solver:
    """FedSpeed (Sun et al. 2023): prox-correction and perturbed gradients.

        g = grad F_i(y_i),   p = grad F_i(y_i + rho g),   q = (1 - alpha) g + alpha p
        y_i <- y_i - local_stepsize (q - h_i + (y_i - x) / lam),   local_steps times from y_i = x
        h_i <- h_i - (y_i - x) / lam        x <- sum_i w_i (y_i - lam h_i)

    h_i (0 at first) stays with the client while the cohort lasts.

    Thesis: FedSpeed (L2330, L4683).
    Holds if: local_stepsize (L (1 + alpha rho L) + 1/lam) <= 1.  The limit has sum_i w_i q_i = 0: the minimiser of F if alpha rho = 0
    or the F_i agree, else one near it.
    """
    _positive(local_steps=local_steps, local_stepsize=local_stepsize, lam=lam)

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

        return _repeat(oracle, x, budget, tolerance, jnp.zeros((cohort.weights.shape[0], x.shape[0]), x.dtype), update)

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

        m_i <- b1 m_i + (1 - b1) g        v_i <- b2 v_i + (1 - b2) g^2,   g = grad F_i(y_i),   v_i = u and y_i = x at first
        p = m_i / (sqrt(u) + eps) + weight_decay y_i
        y_i <- y_i - local_stepsize p |y_i| / |p|,   a layer (leaf of unravel(y_i)) at a time;   local_steps times
        x <- sum_i w_i y_i        u <- max(u, sum_i w_i v_i),   u = eps at first

    m_i (0 at first) stays with the client while the cohort lasts; y_i and v_i travel: two vectors.  A layer at 0 takes the step p.

    Thesis: Fed-LAMB (L4681).
    Holds if: |step| = local_stepsize |y| a layer whatever the gradient, so it ends at about that distance.
    Differs: the scaling phi(|y|) is |y|, and v_i starts from u, where the thesis says nothing.
    """
    _positive(local_steps=local_steps, local_stepsize=local_stepsize, eps=eps)
    _fractions(b1=b1, b2=b2)
    trust = optax.scale_by_trust_ratio()

    def scaled(direction, y):
        layers = unravel(y)
        return ravel_pytree(_transformed(trust, unravel(direction), trust.init(layers), layers)[0])[0]

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
        return _repeat(oracle, x, budget, tolerance, memory, update)

    return solve


def apollo(learning_rate: Any, b: float = 0.9, sigma: float = 1.0, eps: float = 1e-4) -> Solver:
    """Apollo (Ma 2020): a diagonal B from the weak secant equation d^T B d = -d^T (m_new - m), kept away from 0 by sigma.

        m_new = m + (1 - b) / (1 - b^t) (grad F(x) - m)
        B <- B - (d^T (m_new - m) + d^T B d) / (|d|_4 + eps)^4 d^2,   m <- m_new
        d <- m / max(|B|, sigma)        x <- x - learning_rate d

    B, d, m are 0 at first.  The step learning_rate is left out of the secant equation as in the paper, so B estimates learning_rate
    times the Hessian, and (eps aside) only learning_rate / sigma matters.

    Thesis: Apollo (L2332, L4689).
    Holds if: learning_rate / sigma is below 1/L or so.
    Differs: |d|_4 is over the whole vector, not a parameter tensor at a time; no warm-up of the rate, no weight decay.
    """
    _positive(learning_rate=learning_rate, sigma=sigma)
    _fractions(b=b)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def update(here, memory, number):
            m, d, B = memory
            t = (number + 1).astype(x.dtype)
            change = (1 - b) / (1 - b**t) * (here.grad - m)
            length = jnp.sum(d**4) ** 0.25 + eps
            unit = d / length  # the quotient of the docstring, without fourth powers of small numbers
            B = B - (jnp.vdot(unit, change) / length + jnp.vdot(unit, B * unit)) * unit**2
            m = m + change
            d = m / jnp.maximum(jnp.abs(B), sigma)
            return here.x - jnp.asarray(learning_rate, x.dtype) * d, (m, d, B)

        zero = jnp.zeros_like(x)
        return _repeat(oracle, x, budget, tolerance, (zero, zero, zero), update)

    return solve


def oasis(
    learning_rate: Any = 0.1,
    b1: float = 0.0,
    b2: float = 0.99,
    floor: float = 1e-5,
    *,
    adaptive: bool = True,
    samples: int = 10,
    seed: int = 0,
) -> Solver:
    """OASIS (Jahani et al. 2022): the diagonal of the Hessian by Hutchinson's estimator, averaged, and a stepsize that adapts.

        D <- b2 D + (1 - b2) z * (H(x) z),   z uniform on {-1, 1}^d        A = max(|D|, floor)
        e <- min(sqrt(1 + e / e_old) e, |x - x_old|_A / (2 |grad F(x) - grad F(x_old)|_{1/A})),   |u|_A^2 = sum_j A_j u_j^2
        m <- b1 m + (1 - b1) grad F(x)        x <- x - e m / A

    The first step is e = learning_rate, and all steps are if not `adaptive`; D starts as the mean over `samples` z.  H z is the
    derivative of the gradient along z (`jax.jvp`) and travels with it: one evaluation, two vectors.  z come from `seed`.

    Thesis: OASIS (L2333, L4687).
    Holds if: F is twice differentiable; the paper's theory is for b1 = 0.
    Differs: `adaptive` with b1 > 0 uses the same rule for e.
    """
    _positive(learning_rate=learning_rate, floor=floor, samples=samples)
    _fractions(b1=b1, b2=b2)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        key = jax.random.key(seed)

        def probe(x, key):
            z = jax.random.rademacher(key, x.shape, x.dtype)
            (value, grad), (_, curved) = jax.jvp(oracle.value_and_grad, (x,), (z,))
            return Point(x, value, grad), z * curved

        def advance(here, memory, number):
            D, m, step, growth, last = memory
            A = jnp.maximum(jnp.abs(D), floor)
            moved, turned = here.x - last.x, here.grad - last.grad
            smooth = jnp.sqrt(jnp.sum(A * moved**2)) / (2 * jnp.sqrt(jnp.sum(turned**2 / A)))
            adapted = jnp.minimum(jnp.sqrt(1 + growth) * step, smooth)
            usable = adaptive & (number > 0) & jnp.isfinite(adapted) & (adapted > 0)
            following = jnp.where(usable, adapted, step)
            m = b1 * m + (1 - b1) * here.grad
            there, sample = probe(here.x - following * m / A, jax.random.fold_in(key, number + 1))
            # After the first step nothing bounds the growth.
            growth = jnp.where(number > 0, following / step, jnp.inf)
            return there, (b2 * D + (1 - b2) * sample, m, following, growth, here), 1, False

        keys = jax.random.split(jax.random.fold_in(key, 0), samples)
        D = jnp.mean(jax.lax.map(lambda key: probe(x, key)[1], keys), 0)
        step = jnp.asarray(learning_rate, x.dtype)
        last = Point(x, jnp.zeros((), x.dtype), jnp.zeros_like(x))
        return iterate(
            oracle, x, budget, tolerance, (D, jnp.zeros_like(x), step, jnp.full_like(step, jnp.inf), last), advance
        )

    return solve


# Uplink of one aggregation, without and with a gradient that is only there to measure the residual.
_VECTORS = {
    adam: (1, 1),
    fed_opt: (1, 2),
    fed_adam: (1, 2),
    fed_adagrad: (1, 2),
    mime: (1, 1),  # two aggregations a round, so two evaluations: gradients, then models
    mime_lite: (2, 2),  # model and gradient at the server point, together
    fed_speed: (1, 2),
    fed_lamb: (2, 3),  # model and second moment
    apollo: (1, 1),
    oasis: (2, 2),  # gradient and z * (H z)
}


def vectors_per_round(solver: Callable, residual: bool = False) -> int:
    """Vectors of dimension d that one client sends for one of `Result.evaluations`; `solver` is a function of this module.

    `residual`: whether a tolerance is to stop the run; methods that average models then send a gradient beside the model.

    >>> vectors_per_round(fed_adam), vectors_per_round(fed_adam, residual=True), vectors_per_round(mime_lite)
    (1, 2, 2)
    """
    if solver not in _VECTORS:
        raise ValueError(f"solver={solver}; allowed: {', '.join(one.__name__ for one in _VECTORS)} of prox.federated")
    return _VECTORS[solver][residual]
