"""EF-BV: one method for biased compressors (error feedback) and for unbiased compressors (variance reduction)."""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.fedavg import bits_down
from commjax.compressors.sparse import identity
from commjax.core import checks, rounds, tree
from commjax.core.base import Algorithm, Compressor, Constants, Message, Params, Reducer, Round, Spec, State
from commjax.core.local import ClientResult, ValueAndGrad
from commjax.prox import Regularizer, zero
from commjax.theory import ef_bv as theory


class HParams(NamedTuple):
    """Hyperparameters of EF-BV.

    Attributes:
        gamma: stepsize.
        lam: scaling of the control variates, lambda in the thesis.
        nu: scaling of the gradient estimate.
    """

    gamma: Any
    lam: Any
    nu: Any


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless the hyperparameters are in their range.

    gamma must be positive; lam and nu must be at least 0; all three must be finite.  Values above those of the theory
    are allowed.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)
    checks.at_least_zero("lam", hparams.lam)
    checks.at_least_zero("nu", hparams.nu)


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: x, the model.
        shift: h = mean_i h_i, the mean of the clients' control variates.
    """

    round: Int[Array, ""]
    params: Params
    shift: Params


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        shift: h_i, the client's control variate.
    """

    id: Int[Array, "*n"]
    shift: PyTree


@runtime_checkable
class Smoothness(Protocol):
    """The smoothness constants of a problem, as `problems.constants.smoothness` returns them.

    f = mean_i f_i is L-smooth, and each f_i is L_i-smooth.  L_tilde is the root mean square of the L_i, L_max the
    largest L_i.
    """

    @property
    def L(self) -> float:
        """Return the smoothness constant of f."""
        ...

    @property
    def L_tilde(self) -> float:
        """Return the root mean square of the smoothness constants of the f_i."""
        ...

    @property
    def L_max(self) -> float:
        """Return the largest smoothness constant of the f_i."""
        ...


def ef_bv(
    value_and_grad: ValueAndGrad,
    compressor: Compressor,
    regularizer: Regularizer | None = None,
    *,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""EF-BV, which is EF21 at nu == lam and DIANA at nu == 1.

        d_i = C_i(grad f_i(x) - h_i)        h_i <- h_i + lam d_i
        g   = h + nu mean_i d_i             h   <- h + lam mean_i d_i
        x  <- prox_{gamma R}(x - gamma g)

    x is the model, h_i the control variate of client i, h the mean of the h_i, and g the estimate of grad f(x).

    Args:
        value_and_grad: `value_and_grad(params, data)` takes the model and the data of one client.  It returns the loss
            (a scalar) and the gradient (a pytree like `params`).  A stochastic gradient comes from a batch of the data
            (see `runner.minibatches`).
        compressor: C_i, which compresses the uploads.
        regularizer: R; None is R = 0.
        reduce: a reducer of `commjax.core.robust` that replaces mean_i d_i; None is the mean.  A reducer voids the
            three theorems: they need an unbiased mean, and h = mean_i h_i no longer holds.

    Returns:
        The algorithm.  Its `init(params, ids, shift=None)` takes the start h_i^0 of the control variates, with one row
        per client; None is zeros.  Rows other than zeros have to be sent before the first round, which costs bits
        (`bits_init` of a record).

    Thesis: Fig. 2.1 (algorithm); rates in Thm 2.4.1 (PL), Thm 2.4.2 (KL), Thm 2.5.1 (nonconvex).
    Holds if: C_i in C(eta, omega), f_i L_i-smooth, R convex, gradients exact.
    Differs (docs/errata.md): E8 (gamma inside the prox), E9 (it is g^{t+1} that estimates grad f(x^t)).

    Precision in float32: the theory's gamma is small.  A run stalls where gamma g is below half an ulp of x, at a gap
    of about 1e-7.  Use float64 where that matters, and `compressors.rounded` for float32 messages.

    Precision in bfloat16: the rounded updates of h and of the h_i differ, so that h is no longer the mean of the h_i
    and the method converges to another point.  Pass h_i^0 in float32
    (`shift=jax.tree.map(lambda p: jnp.zeros((n, *p.shape)), params)`); then h, the h_i and g stay in float32.  With
    `compressors.rounded(compressor, jnp.bfloat16)` the messages are bfloat16 on the wire.
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

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: Any) -> ClientResult:
        loss, grad = rounds.evaluated(value_and_grad, server.params, data)
        return *client_update(round, hparams.lam, client, tree.cast(grad, client.shift)), loss

    def server_step(hparams: HParams, server: Server, d: Params) -> Server:
        g, shift = estimate(hparams.lam, hparams.nu, server.shift, d)
        params = prox(hparams.gamma, tree.add_scaled(server.params, -hparams.gamma, g))
        return server._replace(params=params, shift=shift)

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, compressor=compressor, reduce=reduce, spec=spec)


def client_update(round: Round, lam: Any, client: Client, grad: PyTree) -> tuple[Client, Message]:
    """Send the compressed difference of a gradient and the control variate h_i, and move h_i.

        d_i = C_i(grad_i - h_i)        h_i <- h_i + lam d_i

    Args:
        round: what the client knows about the round; `round.send` compresses.
        lam: scaling of the control variate, a number.
        client: the client's state, with h_i in `shift`.
        grad: the client's gradient, a pytree like h_i.

    Returns:
        The new state, and the message d_i.
    """
    d = round.send(tree.sub(grad, client.shift))
    return Client(id=client.id, shift=tree.add_scaled(client.shift, lam, d.value)), d


def estimate(lam: Any, nu: Any, shift: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
    """Estimate the mean gradient on the server, and move the mean of the control variates.

        g = h + nu d        h <- h + lam d

    Args:
        lam: scaling of the control variates, a number.
        nu: scaling of the gradient estimate, a number.
        shift: h, the mean of the control variates, a pytree like the model.
        d: mean of the clients' messages, or what a reducer makes of them; a pytree like the model.

    Returns:
        The estimate g and the new h.
    """
    return tree.add_scaled(shift, nu, d), tree.add_scaled(shift, lam, d)


def _check(smoothness: Smoothness, *names: str) -> None:
    if any(not hasattr(smoothness, name) for name in names):
        raise TypeError(f"smoothness={smoothness!r}; allowed: what `problems.constants.smoothness(L_i)` makes")
    for name in names:
        if not 0 < (value := getattr(smoothness, name)) < math.inf:
            raise ValueError(f"smoothness.{name} must be positive and finite, got {value}")


def gd(
    value_and_grad: ValueAndGrad, regularizer: Regularizer | None = None, *, reduce: Reducer | None = None
) -> Algorithm:
    """Proximal gradient descent: EF-BV without compression.

        x <- prox_{gamma R}(x - gamma mean_i grad f_i(x))        at lam = nu = 1

    Args:
        value_and_grad: as in `ef_bv`.
        regularizer: R; None is R = 0.
        reduce: as in `ef_bv`.

    Returns:
        The algorithm.  `gd_hparams` makes its hyperparameters.
    """
    return ef_bv(value_and_grad, identity(), regularizer, reduce=reduce)


def theoretical(
    constants: Constants,
    smoothness: Smoothness,
    regime: str = "pl",
    *,
    lam: float | None = None,
    nu: float | None = None,
) -> HParams:
    """Hyperparameters of EF-BV from theory: lambda*, nu* and the largest gamma that the theorem allows.

    Args:
        constants: eta, omega and omega_ran of the compressor.
        smoothness: L and L_tilde of the problem.
        regime: "pl" (R = 0, Polyak-Lojasiewicz), "kl" (any convex R) or "nonconvex".
        lam: replaces lambda*.
        nu: replaces nu*; in (0, 1].

    Returns:
        The hyperparameters.

    Thesis: Remark 2.4.3.  Differs (docs/errata.md): E5 (cancellation-free), E1 (L_tilde is a root *mean* square).
    """
    _check(smoothness, "L", "L_tilde")
    lam = theory.best_scaling(constants.eta, constants.omega) if lam is None else lam
    nu = theory.best_scaling(constants.eta, constants.omega_ran) if nu is None else nu
    if not 0 < nu <= 1:
        raise ValueError(f"nu must be in (0, 1], got {nu}")
    r_av = theory.contraction(constants.eta, constants.omega_ran, nu)
    gamma = theory.stepsize(smoothness.L, smoothness.L_tilde, constants.eta, constants.omega, lam, r_av, regime=regime)
    return HParams(gamma, lam, nu)


def ef21_hparams(
    constants: Constants, smoothness: Smoothness, regime: str = "pl", *, use_omega_ran: bool = False
) -> HParams:
    """Hyperparameters of EF21: nu = lambda = lambda*, and the largest gamma that the theorem allows.

    Args:
        constants: eta, omega and omega_ran of the compressor.
        smoothness: L and L_tilde of the problem.
        regime: as in `theoretical`.
        use_omega_ran: whether r_av, the contraction factor of the mean, is computed from omega_ran, which allows a
            larger gamma (erratum E4 in docs/errata.md).  By default r_av = r, as in the thesis's table.

    Returns:
        The hyperparameters.
    """
    if not use_omega_ran:
        constants = constants._replace(omega_ran=constants.omega)
    lam = theory.best_scaling(constants.eta, constants.omega)
    return theoretical(constants, smoothness, regime, lam=lam, nu=lam)


def diana_hparams(constants: Constants, smoothness: Smoothness, regime: str = "strongly convex") -> HParams:
    """Hyperparameters of DIANA: nu = 1.

    Args:
        constants: eta, omega and omega_ran of the compressor.
        smoothness: L_max of the problem; L and L_tilde for the regimes of `theoretical`.
        regime: "strongly convex" needs an unbiased compressor and convex f_i; it has lambda = 1/(1+omega) and the
            larger gamma of Prop. 2.4.6.  "pl", "kl" and "nonconvex" allow any compressor and have lambda* (Thm A.2.1).

    Returns:
        The hyperparameters.

    Thesis: Prop. 2.4.6, Thm A.2.1.
    """
    if regime not in (regimes := ("strongly convex", *theory.REGIMES)):
        raise ValueError(f"diana: regime must be one of {regimes}, got {regime!r}")
    if regime != "strongly convex":
        return theoretical(constants, smoothness, regime, nu=1.0)
    _check(smoothness, "L_max")
    if constants.eta != 0:
        raise ValueError(f"diana: the strongly convex regime needs an unbiased compressor, got eta = {constants.eta}")
    lam = theory.best_scaling(0.0, constants.omega)
    return HParams(theory.diana_stepsize(smoothness.L_max, constants.omega_ran), lam, 1.0)


def compressed_gd_hparams(constants: Constants, smoothness: Smoothness) -> HParams:
    """Hyperparameters of gradient descent on unbiased messages without control variates (lambda = 0).

    The method converges only to a neighbourhood of the optimum.

    Args:
        constants: eta (which must be 0) and omega_ran of the compressor.
        smoothness: L and L_max of the problem.

    Returns:
        The hyperparameters: lam = 0, nu = 1.
    """
    if constants.eta != 0:
        raise ValueError(f"compressed_gd: needs an unbiased compressor, got eta = {constants.eta}")
    _check(smoothness, "L", "L_max")
    return HParams(theory.compressed_gd_stepsize(smoothness.L, smoothness.L_max, constants.omega_ran), 0.0, 1.0)


def gd_hparams(smoothness: Smoothness) -> HParams:
    """Hyperparameters of `gd`: gamma = 1/L, lam = nu = 1.

    Args:
        smoothness: L of the problem.

    Returns:
        The hyperparameters.
    """
    _check(smoothness, "L")
    return HParams(1 / smoothness.L, 1.0, 1.0)
