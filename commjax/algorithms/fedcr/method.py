"""FedCR: a shared stochastic feature extractor, heads of one's own, and features that are pulled to what all clients know of a class."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from commjax.compressors import wire
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Codec, Key, Params, Spec, State
from commjax.core.local import Sample

LEAST = 1e-8  # of a standard deviation under a logarithm


class HParams(NamedTuple):
    """stepsize: of the local steps; beta: weight of the divergence; mix: of the new global distributions beside the old (1: new only);
    clip: the greatest norm of a local step's gradient, longer ones are shortened to it (infinity: none is)."""

    stepsize: Any
    beta: Any
    mix: Any = 1.0
    clip: Any = 10.0


def check(hparams: HParams, n: int) -> None:
    """ValueError unless stepsize > 0, beta >= 0, mix in [0, 1] and clip > 0 (infinity: no clipping)."""
    checks.scalars(hparams)
    checks.positive("stepsize", hparams.stepsize)
    checks.at_least_zero("beta", hparams.beta)
    checks.share("mix", hparams.mix)
    checks.above_zero("clip", hparams.clip)


class Normal(NamedTuple):
    """Independent normal variables; `scale` is the standard deviation."""

    mean: Float[Array, "*rows z"]
    scale: Float[Array, "*rows z"]


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # {"body": shared, "head": the start of every client's}
    classes: Normal  # [classes, z]: r(z | y), what the clients together know of a class


class Client(NamedTuple):
    id: Int[Array, "*n"]
    head: PyTree


class Network(NamedTuple):
    """`body(params, inputs) -> Normal` [b, z], `head(params, features) -> scores` [b, classes]; `z` features."""

    body: Callable[[Params, Any], Normal]
    head: Callable[[Params, Array], Array]
    classes: int
    z: int


def gaussian(outputs: Float[Array, "b zz"]) -> Normal:
    """The first half of a network's outputs as means, softplus of the others as standard deviations."""
    mean, raw = jnp.split(outputs, 2, axis=-1)
    return Normal(mean, jax.nn.softplus(raw))


def divergence(q: Normal, p: Normal) -> Float[Array, "*rows"]:
    """KL(q || p), summed over features.

    >>> divergence(Normal(jnp.zeros(2), jnp.ones(2)), Normal(jnp.ones(2), jnp.ones(2))).item()
    1.0
    """
    logs = jnp.log(jnp.maximum(p.scale, LEAST)) - jnp.log(jnp.maximum(q.scale, LEAST))
    return jnp.sum(logs + (q.scale**2 + (q.mean - p.mean) ** 2) / (2 * p.scale**2) - 0.5, axis=-1)


class _Experts(NamedTuple):
    """A product of normal densities is normal: precisions add up, and so do precisions times means."""

    precision: Float[Array, "classes z"]
    weighted: Float[Array, "classes z"]


def _experts(features: Normal, targets: Int[Array, "b"], real: Array, classes: int) -> _Experts:
    """Of each class, the product over the client's rows of it"""
    belongs = (targets[None] == jnp.arange(classes, dtype=targets.dtype)[:, None]) & real[None]
    precision = 1 / features.scale**2
    chosen = belongs.astype(precision.dtype)
    return _Experts(chosen @ precision, chosen @ (precision * features.mean))


def _product(experts: _Experts) -> Normal:
    """With a standard normal as one more expert"""
    precision = 1 + experts.precision
    return Normal(experts.weighted / precision, 1 / jnp.sqrt(precision))


def blank(network: Network, params: Params) -> Server:
    """The first round: nothing is known of any class."""
    if set(params) != {"body", "head"}:
        raise ValueError(f"params has {sorted(params)}; allowed: 'body' and 'head'")
    dtype, shape = jax.tree.leaves(params)[0].dtype, (network.classes, network.z)
    return Server(jnp.zeros((), jnp.int32), params, Normal(jnp.zeros(shape, dtype), jnp.ones(shape, dtype)))


def train(network: Network, sample: Sample, steps: int, key, hparams, classes: Normal, start: Params, data, moves=None):
    """The model after `steps` local steps, and the losses; `moves`: whether a leaf is trained, None: all are."""

    def loss(model, key, rows):
        features = network.body(model["body"], rows.inputs)
        noise = jax.random.normal(key, features.mean.shape, features.mean.dtype)
        scores = network.head(model["head"], features.mean + features.scale * noise)
        entropy = optax.softmax_cross_entropy_with_integer_labels(scores, rows.targets)
        of_rows = jax.tree.map(lambda leaf: leaf[rows.targets], classes)
        each = entropy + jnp.asarray(hparams.beta).astype(entropy.dtype) * divergence(of_rows, features)
        return jnp.sum(rows.weights.astype(each.dtype) * each)

    def one(model, number):
        key_rows, key_noise = jax.random.split(jax.random.fold_in(key, number))
        value, grad = jax.value_and_grad(loss)(model, key_noise, sample(key_rows, data))
        if moves is not None:
            grad = jax.tree.map(lambda g, yes: jnp.where(yes, g, jnp.zeros((), g.dtype)), grad, moves)
        shorter = jnp.minimum(1, hparams.clip / jnp.sqrt(tree.sq_norm(grad)))
        return tree.add_scaled(model, -hparams.stepsize * shorter, grad), value

    return jax.lax.scan(one, start, jnp.arange(steps))


def experts_of(network: Network, model: Params, data: Any) -> _Experts:
    """What a client knows of each class."""
    return _experts(network.body(model["body"], data.inputs), data.targets, data.weights > 0, network.classes)


def known(hparams: Any, old: Normal, experts: _Experts) -> Normal:
    """What all clients together know of each class, `experts` being the sum over them; a class that nobody has stays as it was."""
    new, mix, held = _product(experts), hparams.mix, experts.precision > 0

    def mixed(old, new):
        return jnp.where(held, tree.add_scaled(tree.scale(1 - mix, old), mix, new), old)

    return jax.tree.map(mixed, old, new)


def fedcr(
    network: Network,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Callable = jax.vmap,
) -> Algorithm:
    r"""FedCR (Zhang et al., ICML 2023).  Features are drawn, z ~ N(mu_W(x), sigma_W(x)^2); each client has a head of its own.

        `steps` times, on rows (x, y):   (W_i, head_i) <- SGD step on  CE(head_i(z), y) + beta KL(r(. | y) || N(mu_W(x), sigma_W(x)^2))
        r_i(. | y)  ~  prod over the client's rows (x, y) of N(mu_W(x), sigma_W(x)^2)
        W  <- mean_i W_i,      r(. | y)  ~  N(0, 1) prod_i r_i(. | y)      over the clients that have the class

    The divergence stands for the difference between the clients' and the global conditional mutual information I(x; z | y).  One draw
    of z a step.  Sent up: the body, and mean and deviation of every class; down: the same.  Heads never travel.

    `init(params, ids)` with params {"body", "head"}; data as `data.stacked.Examples`.

    Thesis: comparator of Fig. L1810.
    Holds if: gradients are shortened to `clip` (F27).  In mu the divergence has the curvature beta / sigma^2, and it pulls sigma towards
    the deviations of r, which as products are some hundredths: steps on mu itself overshoot where sigma < sqrt(stepsize beta / 2), sigma
    shrinks again, and a few steps later nothing is finite.  The released code shortens them too, to 10.
    Differs: r_i is the product over all rows of the client with its final body, where the released code takes it batch by batch during
    the last epoch.
    """
    rounds.check_cohort(cohort)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    def init(params: Params, ids: Int[Array, "n"]) -> State:
        return State(blank(network, params), Client(ids, tree.repeat(params["head"], len(ids))))

    def client_step(round, hparams, server, client, data):
        start = {"body": server.params["body"], "head": client.head}
        model, losses = train(network, sample, steps, round.own_key, hparams, server.classes, start, data)
        experts = experts_of(network, model, data)
        members = round.n if cohort is None else cohort
        message = tree.sub(model["body"], server.params["body"]), tree.scale(members, experts)  # a sum, by the mean
        return Client(client.id, model["head"]), round.send(message), losses[0]

    def server_step(hparams, server, received):
        update, experts = received
        params = {**server.params, "body": tree.add(server.params["body"], update)}
        return server._replace(params=params, classes=known(hparams, server.classes, experts))

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(
        init, client_step, server_step, bits_down, cohort, over, down=("params", "classes"), letter=_download(),
        reply=_upload(), spec=spec,
    )  # fmt: skip


def bits_down(server: Any) -> int:
    """The body and the distributions of the classes, as they are"""
    return rounds.dense_bits((server.params["body"], server.classes))


def _download() -> Codec:
    """The body and the classes; a client reads None for the head, which is not sent"""

    def write(key: Key, server: Any, ids: list[int], n: int) -> list[bytes]:
        return [wire.encode_tree((server.params["body"], server.classes))] * len(ids)

    def read(key: Key, data: bytes, server: Any, id: int, n: int) -> tuple[Params, Normal]:
        body, classes = wire.decode_tree(data, (server.params["body"], server.classes))
        return {"body": body, "head": None}, classes

    return Codec(lambda server, id: bits_down(server), write, read)


def _upload() -> Codec:
    """The change of the body and the experts, which have as many numbers as the body and the classes"""

    def read(key: Key, data: bytes, server: Any, id: int, n: int) -> tuple[Params, _Experts]:
        return wire.decode_tree(data, (server.params["body"], _Experts(*server.classes)))

    return Codec(lambda server, id: bits_down(server), lambda key, x, id, n: wire.encode_tree(x), read)


def deployed(server: Any, client: Any) -> Params:
    """What a client deploys: the shared body and its own head, applied to the mean features."""
    return {"body": server.params["body"], "head": client.head}
