"""FedCR: a shared stochastic feature extractor and a head of each client.

The features of a client are pulled towards the distribution of their class over all clients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from commjax.algorithms.fedcr.distributions import Experts, Normal, divergence, experts, known
from commjax.compressors import wire
from commjax.core import checks, local, random_words, rounds, tree
from commjax.core.base import Algorithm, Codec, Key, Message, Params, Round, Spec, State
from commjax.core.local import Sample

# Maps a function of one client over the clients: `jax.vmap` or `rounds.one_by_one`.
Over = Callable[[Callable[..., Any]], Callable[..., Any]]


class HParams(NamedTuple):
    """Hyperparameters of FedCR.

    Attributes:
        stepsize: stepsize of the local steps.
        beta: weight of the divergence.
        mix: weight of the new global distributions against the old ones; 1 uses the new ones only.
        clip: largest norm of the gradient of a local step; a longer gradient is scaled down to it.  Infinity: no
            clipping.
    """

    stepsize: Any
    beta: Any
    mix: Any = 1.0
    clip: Any = 10.0


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless stepsize > 0, beta >= 0, mix in [0, 1] and clip > 0 (infinity: no clipping).

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("stepsize", hparams.stepsize)
    checks.at_least_zero("beta", hparams.beta)
    checks.share("mix", hparams.mix)
    checks.above_zero("clip", hparams.clip)


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: {"body": the shared body, "head": the head with which every client starts}.
        classes: r(z | y), the distribution of the features of each class over all clients, [classes, z].
    """

    round: Int[Array, ""]
    params: Params
    classes: Normal


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        head: the client's head.
    """

    id: Int[Array, "*n"]
    head: PyTree


class Network(NamedTuple):
    """A network for FedCR.

    Attributes:
        body: `body(params, inputs)` returns the distribution of the features, a `Normal` [b, z].
        head: `head(params, features)` returns the scores, [b, classes].
        classes: number of classes.
        z: number of features.
    """

    body: Callable[[Params, Any], Normal]
    head: Callable[[Params, Array], Array]
    classes: int
    z: int


def blank(network: Network, params: Params) -> Server:
    """Return the server's state before the first round: every class has the standard normal distribution.

    Args:
        network: the network.
        params: {"body", "head"}.

    Returns:
        The server's state.
    """
    if set(params) != {"body", "head"}:
        raise ValueError(f"params has {sorted(params)}; allowed: 'body' and 'head'")
    dtype, shape = jax.tree.leaves(params)[0].dtype, (network.classes, network.z)
    return Server(jnp.zeros((), jnp.int32), params, Normal(jnp.zeros(shape, dtype), jnp.ones(shape, dtype)))


class Local(NamedTuple):
    """What the local steps of a client start from.

    Attributes:
        key: the client's key of the round.
        hparams: the hyperparameters.
        classes: r(z | y), [classes, z].
        start: {"body", "head"} with which the client starts.
        data: the client's data, as `data.stacked.Examples` without the client axis.
        moves: a tree like `start` that says whether each leaf is trained; None is all of them.
    """

    key: Key
    hparams: Any
    classes: Normal
    start: Params
    data: Any
    moves: PyTree = None


def train(network: Network, sample: Sample, steps: int, work: Local) -> tuple[Params, Float[Array, "steps"]]:
    """Take the local steps of one client.

    Args:
        network: the network.
        sample: `sample(key, data)` returns the rows for one step.
        steps: number of local steps.
        work: what the client starts from.

    Returns:
        The model after the steps, and the loss at each step.
    """
    hparams, moves = work.hparams, work.moves

    def loss(model: Params, key: Key, rows: Any) -> Array:
        features = network.body(model["body"], rows.inputs)
        noise = random_words.normal(key, features.mean.shape, features.mean.dtype)
        scores = network.head(model["head"], features.mean + features.scale * noise)
        entropy = optax.softmax_cross_entropy_with_integer_labels(scores, rows.targets)
        of_rows = jax.tree.map(lambda leaf: leaf[rows.targets], work.classes)
        each = entropy + jnp.asarray(hparams.beta).astype(entropy.dtype) * divergence(of_rows, features)
        return jnp.sum(rows.weights.astype(each.dtype) * each)

    def local_step(model: Params, number: Array) -> tuple[Params, Array]:
        key_rows, key_noise = jax.random.split(jax.random.fold_in(work.key, number))
        value, grad = jax.value_and_grad(loss)(model, key_noise, sample(key_rows, work.data))
        if moves is not None:
            grad = jax.tree.map(lambda g, yes: jnp.where(yes, g, jnp.zeros((), g.dtype)), grad, moves)
        shorter = jnp.minimum(1, hparams.clip / jnp.sqrt(tree.sq_norm(grad)))
        return tree.add_scaled(model, -hparams.stepsize * shorter, grad), value

    return jax.lax.scan(local_step, work.start, jnp.arange(steps))


def experts_of(network: Network, model: Params, data: Any) -> Experts:
    """Return what a client uploads about each class: the product of the feature distributions of its rows.

    Args:
        network: the network.
        model: {"body", "head"} of the client.
        data: the client's data, as `data.stacked.Examples` without the client axis.

    Returns:
        The precisions and the precisions times means, [classes, z] each.
    """
    return experts(network.body(model["body"], data.inputs), data.targets, data.weights > 0, network.classes)


def fedcr(
    network: Network,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Over = jax.vmap,
) -> Algorithm:
    r"""FedCR (Zhang et al., ICML 2023): a shared stochastic body, a head per client, shared class distributions.

    The body W maps an input x to random features z ~ N(mu_W(x), sigma_W(x)^2); the head of client i maps z to scores.
    r(z | y) is the distribution of the features of class y over all clients.  In every round:

        `steps` times, on rows (x, y):
            (W_i, head_i) <- SGD step on  CE(head_i(z), y) + beta KL(r(. | y) || N(mu_W(x), sigma_W(x)^2))
        r_i(. | y)  ~  prod over the client's rows (x, y) of N(mu_W(x), sigma_W(x)^2)
        W  <- mean_i W_i,      r(. | y)  ~  N(0, 1) prod_i r_i(. | y)      over the clients that have the class

    The divergence approximates the difference between the clients' and the global conditional mutual information
    I(x; z | y).  A step draws z once.  The upload is the body and two numbers for every class and feature (precision
    and precision times mean).  The download is the body, and the mean and the deviation for every class and feature.
    Heads are never sent.

    Args:
        network: the network.
        sample: `sample(key, data)` returns the rows of one client's data for one step.
        steps: number of local steps in a round.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.
        over: maps the local training over the clients: `jax.vmap`, or `rounds.one_by_one` for large models.

    Returns:
        The algorithm.  Its `init(params, ids)` takes params {"body", "head"}.  The data are `data.stacked.Examples`.

    Thesis: comparator of Fig. 4.2.
    Holds if: gradients are clipped to `clip` (erratum F27 in docs/errata.md).  The divergence pulls sigma towards the
    small standard deviations of r, and its curvature in mu is beta / sigma^2.  Where sigma < sqrt(stepsize beta / 2), a
    step without clipping overshoots, and the numbers become infinite after a few steps.  The released code clips to 10.
    Differs: r_i is the product over all rows of the client, with the body after the last step.  The released code
    multiplies batch by batch during the last epoch.
    """
    rounds.check_cohort(cohort)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    def init(params: Params, ids: Int[Array, "n"]) -> State:
        return State(blank(network, params), Client(ids, tree.repeat(params["head"], len(ids))))

    def client_step(round: Round, hparams: Any, server: Any, client: Any, data: Any) -> tuple[Client, Message, Array]:
        start = {"body": server.params["body"], "head": client.head}
        model, losses = train(network, sample, steps, Local(round.client_key, hparams, server.classes, start, data))
        told = experts_of(network, model, data)
        members = round.n if cohort is None else cohort
        # The server averages the messages.  The factor turns the mean of the experts into their sum.
        message = tree.sub(model["body"], server.params["body"]), tree.scale(members, told)
        return Client(client.id, model["head"]), round.send(message), losses[0]

    def server_step(hparams: Any, server: Any, received: Any) -> Any:
        update, total = received
        params = {**server.params, "body": tree.add(server.params["body"], update)}
        return server._replace(params=params, classes=known(hparams, server.classes, total))

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(
        init,
        client_step,
        server_step,
        bits_down,
        cohort,
        over,
        down=("params", "classes"),
        download=_download(),
        upload=_upload(),
        spec=spec,
    )


def bits_down(server: Any) -> int:
    """Bits of a download: the body and the distributions of the classes, uncompressed."""
    return rounds.dense_bits((server.params["body"], server.classes))


def _download() -> Codec:
    """Codec of the download: the body and the class distributions.  A client reads None for the head."""

    def write(key: Key, server: Any, ids: list[int], n: int) -> list[bytes]:
        return [wire.encode_tree((server.params["body"], server.classes))] * len(ids)

    def read(key: Key, data: bytes, server: Any, id: int, n: int) -> tuple[Params, Normal]:
        body, classes = wire.decode_tree(data, (server.params["body"], server.classes))
        return {"body": body, "head": None}, classes

    return Codec(lambda server, id: bits_down(server), write, read)


def _upload() -> Codec:
    """Codec of the upload: the change of the body, and the experts, which have the shapes of the distributions."""

    def read(key: Key, data: bytes, server: Any, id: int, n: int) -> tuple[Params, Experts]:
        return wire.decode_tree(data, (server.params["body"], Experts(*server.classes)))

    return Codec(lambda server, id: bits_down(server), lambda key, x, id, n: wire.encode_tree(x), read)


def deployed(server: Any, client: Any) -> Params:
    """Return the model that a client deploys: the shared body and the client's head.

    To predict, apply the head to the mean features, without drawing.

    Args:
        server: the server's state.
        client: one client's row, without a client axis.

    Returns:
        {"body", "head"}.
    """
    return {"body": server.params["body"], "head": client.head}
