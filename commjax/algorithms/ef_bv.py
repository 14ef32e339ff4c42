"""EF-BV: error feedback for biased and variance reduction for unbiased compressors, in one method."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.compressors.sparse import identity
from commjax.core import checks, rounds, tree
from commjax.core.base import Algorithm, Compressor, Constants, Params, Reducer, Spec, State
from commjax.prox import Regularizer, zero
from commjax.theory import ef_bv as theory


class HParams(NamedTuple):
    """gamma: stepsize; lam (lambda): scaling of the control variates; nu: scaling of the gradient estimate."""

    gamma: Any
    lam: Any
    nu: Any


def check(hparams: HParams, n: int) -> None:
    """ValueError unless gamma > 0, lambda and nu are at least 0, all finite; larger ones than the theory's are allowed."""
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)
    checks.at_least_zero("lam", hparams.lam)
    checks.at_least_zero("nu", hparams.nu)


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # x
    shift: Params  # h = mean_i h_i


class Client(NamedTuple):
    id: Int[Array, "*n"]
    shift: PyTree  # h_i


@runtime_checkable
class Smoothness(Protocol):
    """What `commjax.problems` reports of a problem."""

    @property
    def L(self) -> float: ...
    @property
    def L_tilde(self) -> float: ...
    @property
    def L_max(self) -> float: ...


def ef_bv(
    value_and_grad: Callable[[Params, Any], tuple[Array, Params]],
    compressor: Compressor,
    regularizer: Regularizer | None = None,
    *,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""EF-BV, which is EF21 at nu == lam and DIANA at nu == 1.

        d_i = C_i(grad f_i(x) - h_i)        h_i <- h_i + lam d_i
        g   = h + nu mean_i d_i             h   <- h + lam mean_i d_i
        x  <- prox_{gamma R}(x - gamma g)

    `value_and_grad(params, data)` is one client's; it may be stochastic through its batch (see `runner.minibatches`).
    `init(params, ids, shift=...)` takes one row of h_i^0 per client, by default zero; the first exchange of other rows is
    not free (`bits_init` of a record).  `reduce`: a reducer of `commjax.core.robust` instead of mean_i d_i.  It voids the three theorems:
    they need an unbiased mean, and h = mean_i h_i no longer holds.

    Thesis: Alg. EF-BV (Fig. 2.1); rates Thm 2.1 (PL), 2.2 (KL), 2.3 (nonconvex).
    Holds if: C_i in C(eta, omega), f_i L_i-smooth, R convex, gradients exact.
    Differs: E8 (gamma inside the prox), E9 (it is g^{t+1} that estimates grad f(x^t)).
    Precision: with theory's small gamma a float32 run stalls where gamma g is below half an ulp of x, a gap near 1e-7; use
    float64 (and `compressors.rounded` for float32 messages) where that matters.  In bfloat16 the rounded updates of h and of
    the h_i drift apart, h is no longer their mean, and the method settles elsewhere: with bfloat16 params give h_i^0 in float32
    (`shift=jax.tree.map(lambda p: jnp.zeros((n, *p.shape)), params)`; h, the h_i and g then stay in float32) and `compressors.rounded(compressor, jnp.bfloat16)`, whose
    messages are bfloat16 on the wire.
    """
    prox = (zero() if regularizer is None else regularizer).prox

    def init(params: Params, ids: Int[Array, "n"], shift: PyTree | None = None) -> State:
        rows = tree.repeat(tree.zeros_like(params), len(ids)) if shift is None else shift
        wanted = [(len(ids), *jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
        given = [jnp.shape(leaf) for leaf in jax.tree.leaves(rows)]
        if given != wanted or jax.tree.structure(rows) != jax.tree.structure(params):
            raise ValueError(
                f"shift must have a row like params for each client, leaves of shapes {wanted}; got {given}"
            )
        server = Server(round=jnp.zeros((), jnp.int32), params=params, shift=rounds.mean(rows))
        return State(server, Client(id=ids, shift=rows))

    def client_step(round, hparams, server, client, data):
        loss, grad = rounds.evaluated(value_and_grad, server.params, data)
        d = round.send(tree.sub(tree.cast(grad, client.shift), client.shift))
        return Client(id=client.id, shift=tree.add_scaled(client.shift, hparams.lam, d.value)), d, loss

    def server_step(hparams, server, d):
        g = tree.add_scaled(server.shift, hparams.nu, d)
        return server._replace(
            params=prox(hparams.gamma, tree.add_scaled(server.params, -hparams.gamma, g)),
            shift=tree.add_scaled(server.shift, hparams.lam, d),
        )

    def bits_down(server):
        return rounds.dense_bits(server.params)

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, compressor=compressor, reduce=reduce, spec=spec)


def _check(smoothness: Smoothness, *names: str) -> None:
    if any(not hasattr(smoothness, name) for name in names):
        raise TypeError(f"smoothness={smoothness!r}; allowed: what `problems.constants.smoothness(L_i)` makes")
    for name in names:
        if not 0 < (value := getattr(smoothness, name)) < math.inf:
            raise ValueError(f"smoothness.{name} must be positive and finite, got {value}")


def gd(value_and_grad, regularizer: Regularizer | None = None, *, reduce: Reducer | None = None) -> Algorithm:
    """Proximal gradient descent: EF-BV without compression; `reduce` as there."""
    return ef_bv(value_and_grad, identity(), regularizer, reduce=reduce)


def theoretical(
    constants: Constants,
    smoothness: Smoothness,
    regime: str = "pl",
    *,
    lam: float | None = None,
    nu: float | None = None,
) -> HParams:
    """lambda*, nu* (or those given) and the largest gamma that the theorem allows.

    regime: "pl" (R = 0, Polyak-Lojasiewicz), "kl" (any convex R) or "nonconvex".

    Thesis: Remark 1 (L1052).  Differs: E5 (cancellation-free), E1 (L_tilde is a root *mean* square).
    """
    _check(smoothness, "L", "L_tilde")
    lam = theory.best_scaling(constants.eta, constants.omega) if lam is None else lam
    nu = theory.best_scaling(constants.eta, constants.omega_ran) if nu is None else nu
    if not 0 < nu <= 1:
        raise ValueError(f"nu must be in (0, 1], got {nu}")
    r_av = theory.contraction(constants.eta, constants.omega_ran, nu)
    gamma = theory.stepsize(smoothness.L, smoothness.L_tilde, constants.eta, constants.omega, lam, r_av, regime)
    return HParams(gamma, lam, nu)


def ef21(constants: Constants, smoothness: Smoothness, regime: str = "pl", *, use_omega_ran: bool = False) -> HParams:
    """nu = lambda = lambda*; gamma with r_av = r as in the thesis's table, or with the finer r_av of omega_ran (E4f)."""
    if not use_omega_ran:
        constants = constants._replace(omega_ran=constants.omega)
    lam = theory.best_scaling(constants.eta, constants.omega)
    return theoretical(constants, smoothness, regime, lam=lam, nu=lam)


def diana(constants: Constants, smoothness: Smoothness, regime: str = "strongly convex") -> HParams:
    """nu = 1.  "strongly convex": lambda = 1/(1+omega), unbiased compressors, f_i convex, the larger gamma of Prop. DIANA
    (L1097).  "pl", "kl", "nonconvex": lambda*, any compressor (App. B, L2911)."""
    if regime not in (regimes := ("strongly convex", *theory.REGIMES)):
        raise ValueError(f"diana: regime must be one of {regimes}, got {regime!r}")
    if regime != "strongly convex":
        return theoretical(constants, smoothness, regime, nu=1.0)
    _check(smoothness, "L_max")
    if constants.eta != 0:
        raise ValueError(f"diana: the strongly convex regime needs an unbiased compressor, got eta = {constants.eta}")
    lam = theory.best_scaling(0.0, constants.omega)
    return HParams(theory.diana_stepsize(smoothness.L_max, constants.omega_ran), lam, 1.0)


def compressed_gd(constants: Constants, smoothness: Smoothness) -> HParams:
    """No control variates (lambda = 0): gradient descent on unbiased messages, which stops at a neighbourhood."""
    if constants.eta != 0:
        raise ValueError(f"compressed_gd: needs an unbiased compressor, got eta = {constants.eta}")
    _check(smoothness, "L", "L_max")
    return HParams(theory.compressed_gd_stepsize(smoothness.L, smoothness.L_max, constants.omega_ran), 0.0, 1.0)


def gradient_descent(smoothness: Smoothness) -> HParams:
    """gamma = 1/L for `gd`."""
    _check(smoothness, "L")
    return HParams(1 / smoothness.L, 1.0, 1.0)
