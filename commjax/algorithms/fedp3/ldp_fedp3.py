"""LDP-FedP3: FedP3's aggregation sketch with messages that are differentially private for each client's rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from commjax.algorithms.fedp3.sketched import Client, Server, check_dimension, server_step, use_key
from commjax.algorithms.flix import client_value
from commjax.compressors.joint import perm_k
from commjax.core import checks, rounds, tree
from commjax.core.base import Algorithm, Compressor, Message, Params, Round, Spec, State
from commjax.privacy import accounting, mechanism
from commjax.privacy.accounting import Guarantee
from commjax.privacy.mechanism import Loss
from commjax.theory import ldp_fedp3 as theory


class HParams(NamedTuple):
    """Hyperparameters of LDP-FedP3.

    Attributes:
        gamma: stepsize.
        clip: C, the norm to which the gradient of a row is clipped.
        noise: z, the noise multiplier; the standard deviation of the noise on the sum of gradients is z C.
        rate: q, the probability that a row is drawn in a round.
    """

    gamma: Any
    clip: Any
    noise: Any
    rate: Any


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless gamma > 0, clip > 0, noise >= 0 and 0 < rate <= 1.

    clip may be infinite (no clipping) only without noise, whose deviation is noise times clip.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)
    checks.above_zero("clip", hparams.clip)
    checks.at_least_zero("noise", hparams.noise)
    if not isinstance(hparams.noise, Tracer) and np.all(np.asarray(hparams.noise) > 0):
        checks.positive("clip", hparams.clip)
    checks.probability("rate", hparams.rate)


def ldp_fedp3(
    loss: Loss,
    sketch: Compressor | None = None,
    *,
    clipped: Literal["whole", "sent"] = "whole",
    capacity: int | None = None,
    rows: ArrayLike | None = None,
    over: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.vmap,
) -> Algorithm:
    r"""LDP-FedP3.

        every row of client i is drawn with probability q (Poisson sampling)
        g_i = (sum over these rows of clip_C(grad f_ij(w)) + z C N(0, I)) / (q m_i)
        w  <- (1/n) sum_i S_i (w - gamma g_i)

    The loss in the metrics is exact.  The certificate does not cover it, so that it must not be released.

    Args:
        loss: `loss(params, rows)` returns the mean loss over rows of one client, a scalar.  Rows with `weights` 0 are
            padding.
        sketch: S_i; None is perm-k.
        clipped: "whole" clips the whole gradient of a row.  "sent" clips only its coordinates that S_i sends, d/n of
            them: C may then be smaller by sqrt(n) for the same bias, and the noise shrinks with C.
        capacity: largest number of rows that are differentiated in a round; None is all rows.  A capacity saves memory
            and time and costs a little of delta (`accounting.guarantee`).
        rows: m_i, the public numbers of rows, one number or one per client.  None counts the rows.  A certificate for
            "replace-one" allows that; one for "add-remove" does not, because it hides the number of rows.
        over: maps the client step over the clients.

    Returns:
        The algorithm.  Its `init(params, ids, data=None)` checks that the loss is a mean over rows if it gets the data.

    Thesis: Alg. 11.
    Holds if: `accounting.guarantee(z, q, rounds, delta)`; the client draws rows and noise from a source that nobody
    else knows (in a simulation all keys are the run's, in a federation see `exchange.answer`); the m_i are public, and
    no client has more rows.
    Differs: F16 (noise on the gradient, so gamma scales it), F17 (each row is clipped), F18 (Poisson sampling and a
    fixed denominator), F20 (z comes from an accountant).
    """
    sketch = sketch or perm_k()
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity}; allowed: at least 1 row (or None for all)")
    if clipped not in ("whole", "sent"):
        raise ValueError(f"clipped={clipped!r}; allowed: 'whole', 'sent'")
    if rows is not None and not np.all(np.asarray(rows) >= 1):
        raise ValueError(f"rows={rows}; allowed: at least 1, one number or one for each client")
    public = rows
    grad = jax.grad(loss)

    def init(params: Params, ids: Int[Array, "n"], data: Any = None) -> State:
        check_dimension(sketch, tree.size(params), len(ids))
        if data is not None:
            mechanism.check_per_example(loss, params, mechanism.largest(data))
            counts = np.asarray(jax.vmap(lambda rows: jnp.sum(mechanism.present(rows)))(data))
            if public is None and counts.min() < 1:
                raise ValueError(f"data: client {counts.argmin()} has 0 rows; allowed: at least 1 (or public `rows`)")
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids))

    def client_step(
        round: Round, hparams: Any, server: Server, client: Client, data: Any
    ) -> tuple[Client, Message, Array]:
        present = mechanism.present(data)
        came = mechanism.poisson(use_key(round.client_key, 2), hparams.rate, present)
        rows, drawn = jnp.arange(len(came)), came
        if capacity is not None and capacity < len(came):
            rows = jnp.nonzero(came, size=capacity, fill_value=0)[0]
            drawn = jnp.arange(capacity) < jnp.sum(came)
        grads = jax.vmap(lambda row: grad(server.params, mechanism.single(data, row)))(rows)
        if clipped == "sent":
            sent = sketch.compress(round.key, jax.tree.map(jnp.ones_like, server.params), round.id, round.n).value
            grads = jax.tree.map(lambda leaf, part: jnp.where((part != 0)[None], leaf, 0), grads, sent)
        total = mechanism.clipped_sum(grads, hparams.clip, drawn)[0]
        # Without noise (and privacy) C may be infinite, and 0 * infinity is not a number.
        deviation = jnp.where(hparams.noise > 0, hparams.noise * jnp.asarray(hparams.clip), 0.0)
        total = tree.add_scaled(total, deviation, mechanism.gaussian_like(use_key(round.client_key, 3), total))
        m = jnp.sum(present) if public is None else client_value(public, client.id)
        batch = hparams.rate * jnp.maximum(m, 1).astype(jnp.zeros(()).dtype)
        model = tree.add_scaled(server.params, -hparams.gamma, tree.scale(1 / batch, total))
        return client, round.send(model), loss(server.params, data)

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(
        init, client_step, server_step, bits_down, over=over, compressor=sketch, private=True, spec=spec
    )


def bits_down(server: Server) -> int:
    """Bits of a download: w, uncompressed."""
    return rounds.dense_bits(server.params)


def calibrated(
    epsilon: float,
    delta: float,
    *,
    gamma: float,
    clip: float,
    batch: float,
    rows: int | Sequence[int],
    rounds: int,
    accountant: str = "pld",
    relation: str = "replace-one",
    capacity: int | None = None,
) -> tuple[HParams, Guarantee]:
    """Hyperparameters with the least noise that is (epsilon, delta)-DP over a run, and the certificate.

    Args:
        epsilon: target of the certificate.
        delta: target of the certificate.
        gamma: stepsize.
        clip: C, the norm to which the gradient of a row is clipped.
        batch: mean number of rows that the smallest client draws in a round.
        rows: m, or the m_i of all clients, which are public.  For "add-remove" the algorithm needs the same `rows`.
        rounds: number of rounds of the run.
        accountant: "pld" or "rdp" (`accounting.guarantee`).
        relation: "replace-one" or "add-remove", by which neighbouring data sets differ.
        capacity: as in `ldp_fedp3`.

    Returns:
        The hyperparameters and the certificate.

    >>> hparams, certificate = calibrated(8.0, 1e-5, gamma=0.1, clip=1.0, batch=50.0, rows=50, rounds=100)
    >>> hparams.noise == certificate.noise, certificate.epsilon <= 8, certificate.relation
    (True, True, 'replace-one')
    """
    fewest, most = int(np.min(rows)), int(np.max(rows))
    if not 0 < batch <= fewest:
        raise ValueError(f"batch={batch}; allowed: positive, at most the {fewest} rows of a client")
    _check_scales(gamma, clip)
    certificate = accounting.calibrate(
        epsilon,
        delta,
        batch / fewest,
        rounds,
        accountant=accountant,
        relation=relation,
        capacity=capacity,
        rows=None if capacity is None else most,
    )
    return HParams(gamma, clip, certificate.noise, certificate.rate), certificate


def _check_scales(gamma: float, clip: float) -> None:
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma={gamma}; allowed: positive and finite")
    if not 0 < clip < math.inf:
        raise ValueError(f"clip={clip}; allowed: positive and finite (without clipping there is no privacy)")


def theoretical(
    epsilon: float, delta: float, *, L: float, delta0: float, clip: float, d: int, rows: int, batch: float, c: float
) -> tuple[HParams, int]:
    """The thesis's stepsize, noise and number of rounds, which contain an unknown constant c.

    They come without a certificate: see `calibrated`.

    Args:
        epsilon: privacy parameter.
        delta: privacy parameter.
        L: smoothness constant.
        delta0: f(w^0) - f*.
        clip: C, the norm to which the gradient of a row is clipped.
        d: number of params.
        rows: m, the number of rows of a client.
        batch: mean number of rows that a client draws in a round.
        c: the unknown constant.

    Returns:
        The hyperparameters and the number of rounds.

    Thesis: Sec. 4.3 (convergence theorem of LDP-FedP3).
    Differs: F15, F19, F20; sigma = z C / b is the noise on the mean gradient.

    >>> hparams, rounds = theoretical(1.0, 1e-5, L=2.0, delta0=10.0, clip=1.0, d=100, rows=500, batch=500.0, c=1.0)
    >>> round(hparams.gamma, 6), rounds
    (0.151743, 218)
    """
    if not 0 < batch <= rows:
        raise ValueError(f"batch={batch}; allowed: positive, at most the {rows} rows of a client")
    plan = theory.schedule(epsilon, delta, L=L, delta0=delta0, C=clip, c=c, d=d, m=rows)
    rounds = math.ceil(plan.K)
    sigma = math.sqrt(theory.noise_variance(epsilon, delta, c=c, C=clip, K=rounds, m=rows))
    return HParams(plan.gamma, clip, sigma * batch / clip, batch / rows), rounds
