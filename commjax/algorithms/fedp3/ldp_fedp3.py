"""LDP-FedP3: FedP3's aggregation sketch with messages that are differentially private for each client's rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from commjax.algorithms.fedp3.sketched import Client, Server, check_dimension, server_step, use_key
from commjax.algorithms.flix import own
from commjax.compressors.joint import perm_k
from commjax.core import checks, rounds, tree
from commjax.core.base import Algorithm, Compressor, Params, Spec, State
from commjax.privacy import accounting, mechanism
from commjax.privacy.accounting import Certificate
from commjax.privacy.mechanism import Loss
from commjax.theory import ldp_fedp3 as theory


class HParams(NamedTuple):
    """gamma: stepsize; clip (C): norm to which a row's gradient is clipped; noise (z): multiplier of C; rate (q): chance of a row."""

    gamma: Any
    clip: Any
    noise: Any
    rate: Any


def check(hparams: HParams, n: int) -> None:
    """ValueError unless gamma > 0, clip > 0 (infinity: no clipping), noise >= 0 and 0 < rate <= 1."""
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)
    checks.above_zero("clip", hparams.clip)
    checks.at_least_zero("noise", hparams.noise)
    checks.probability("rate", hparams.rate)


def ldp_fedp3(
    loss: Loss,
    sketch: Compressor | None = None,
    *,
    clipped: Literal["whole", "sent"] = "whole",
    capacity: int | None = None,
    rows: ArrayLike | None = None,
    over: Callable = jax.vmap,
) -> Algorithm:
    r"""LDP-FedP3.

        rows of client i come with chance q each (Poisson sampling)
        g_i = (sum over these rows of clip_C(grad f_ij(w)) + z C N(0, I)) / (q m_i)
        w  <- (1/n) sum_i S_i (w - gamma g_i)

    `loss(params, rows)` is a mean over a client's rows (`init(params, ids, data=...)` checks that); data with `weights` has
    padding where these are 0.  `clipped="sent"` clips only the coordinates of the gradient that S_i sends, which are d/n: then
    C may be smaller by sqrt(n) for the same bias, and so is the noise.  `capacity` rows at most are differentiated in a round:
    memory and time for a little of delta (`accounting.certify`).  `rows`: the m_i, public, one number or one a client.  Without it they
    are counted, which a certificate for "replace-one" allows and one for "add-remove" does not: there the number of rows is what is
    to be hidden.  The metrics' loss is exact, no part of what is certified, and for the experimenter's eyes only.

    Thesis: Alg. L4171.
    Holds if: `accounting.certify(z, q, rounds, delta)`; the client draws rows and noise from a source that nobody else knows
    (in a simulation all keys come from the run's, in a federation see `exchange.answer`); the m_i are public, and no client has
    more rows.
    Differs: F16 (noise on the gradient, so gamma scales it), F17 (each row is clipped), F18 (Poisson sampling and a fixed
    denominator), F20 (z comes from an accountant).
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
            counts = np.asarray(jax.vmap(lambda one: jnp.sum(mechanism.present(one)))(data))
            if public is None and counts.min() < 1:
                raise ValueError(f"data: client {counts.argmin()} has 0 rows; allowed: at least 1 (or public `rows`)")
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids))

    def client_step(round, hparams, server, client, data):
        present = mechanism.present(data)
        came = mechanism.poisson(use_key(round.own_key, 2), hparams.rate, present)
        rows, here = jnp.arange(len(came)), came
        if capacity is not None and capacity < len(came):
            rows = jnp.nonzero(came, size=capacity, fill_value=0)[0]
            here = jnp.arange(capacity) < jnp.sum(came)
        grads = jax.vmap(lambda row: grad(server.params, mechanism.single(data, row)))(rows)
        if clipped == "sent":
            sent = sketch.compress(round.key, jax.tree.map(jnp.ones_like, server.params), round.id, round.n).value
            grads = jax.tree.map(lambda leaf, part: jnp.where((part != 0)[None], leaf, 0), grads, sent)
        total = mechanism.clipped_sum(grads, hparams.clip, here)[0]
        # With an infinite C there is no noise, and no privacy.
        deviation = jnp.where(hparams.noise > 0, hparams.noise * jnp.asarray(hparams.clip), 0.0)
        total = tree.add_scaled(total, deviation, mechanism.gaussian_like(use_key(round.own_key, 3), total))
        m = jnp.sum(present) if public is None else own(public, client.id)
        batch = hparams.rate * jnp.maximum(m, 1).astype(jnp.zeros(()).dtype)
        model = tree.add_scaled(server.params, -hparams.gamma, tree.scale(1 / batch, total))
        return client, round.send(model), loss(server.params, data)

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(
        init, client_step, server_step, bits_down, over=over, compressor=sketch, private=True, spec=spec
    )


def bits_down(server: Server) -> int:
    """w, as it is"""
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
) -> tuple[HParams, Certificate]:
    """HParams with the least noise that is (epsilon, delta)-DP over `rounds` rounds, and the certificate.

    `rows`: m, or the m_i of all clients, public; `batch`: rows a round, on average, of the smallest client.  For "add-remove" the
    algorithm has to be told the same `rows`.

    >>> hparams, certificate = calibrated(8.0, 1e-5, gamma=0.1, clip=1.0, batch=50.0, rows=50, rounds=100)
    >>> hparams.noise == certificate.noise, certificate.epsilon <= 8, certificate.relation
    (True, True, 'replace-one')
    """
    fewest, most = int(np.min(rows)), int(np.max(rows))
    if not 0 < batch <= fewest:
        raise ValueError(f"batch={batch}; allowed: positive, at most the {fewest} rows of a client")
    _check_scales(gamma, clip)
    found = accounting.calibrate(
        epsilon,
        delta,
        batch / fewest,
        rounds,
        accountant=accountant,
        relation=relation,
        capacity=capacity,
        rows=None if capacity is None else most,
    )
    return HParams(gamma, clip, found.noise, found.rate), found


def _check_scales(gamma: float, clip: float) -> None:
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma={gamma}; allowed: positive and finite")
    if not 0 < clip < math.inf:
        raise ValueError(f"clip={clip}; allowed: positive and finite (without clipping there is no privacy)")


def theoretical(
    epsilon: float, delta: float, *, L: float, delta0: float, clip: float, d: int, rows: int, batch: float, c: float
) -> tuple[HParams, int]:
    """The thesis's stepsize, noise and number of rounds, with its unknown constant c.  No certificate: see `calibrated`.

    Thesis: Thm L1779.  Differs: F15, F19, F20; sigma = z C / b is the noise on the mean gradient.

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
