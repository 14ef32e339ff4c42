"""FedP3 between machines: each client gets a download of its own and uploads the layers that it trains."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from commjax.algorithms.fedavg import server_step
from commjax.algorithms.fedp3 import aggregation, layers, submodels, wire
from commjax.algorithms.fedp3.aggregation import Uploads
from commjax.algorithms.fedp3.client import Client, Download, client_keys
from commjax.algorithms.fedp3.method import Method
from commjax.core import rounds
from commjax.core.base import Codec, Exchange, Key, Message, Params, Round, State


class RemoteServer(NamedTuple):
    """What a remote server remembers.

    Attributes:
        round: number of rounds so far.
        params: W.
        logits: [n, layers], the aggregation logits if the server learns them.
    """

    round: Int[Array, ""]
    params: Params
    logits: Any = None


def exchange(method: Method) -> Exchange:
    """The client step and the server step of FedP3 for remote clients.

    The download is P_i (.) W with its masks, the upload the layers of L_i, both as `commjax.algorithms.fedp3.wire`
    writes them.

    Args:
        method: the method.

    Returns:
        The exchange.
    """
    # A remote client computes only its own branch.
    remote = _Remote(replace(method, over=rounds.one_by_one))
    return Exchange(
        remote.client_step,
        None,
        remote.bits_down,
        ("params",),
        None,
        method.cohort,
        download=Codec(partial(remote.bits, 1), remote.write_down, remote.read_down),
        upload=Codec(partial(remote.bits, 0), remote.write_up, remote.read_up),
        joined=remote.joined,
        start=remote.start,
    )


@dataclass(frozen=True, eq=False)
class _Remote:
    """The functions of an `Exchange`."""

    method: Method

    def start(self, state: State) -> State:
        """The state that a remote server and remote clients begin with."""
        server, clients = state
        trained, plan = clients.plan.trained, self.method.plan
        if not isinstance(trained, Tracer) and not isinstance(clients.id, Tracer):
            keep = layers.ratios(plan)[np.asarray(clients.plan.ratio)]
            rows = np.asarray(clients.id)
            if not (np.array_equal(trained, plan.trained[rows]) and np.array_equal(keep, plan.keep[rows])):
                raise ValueError("plan: remote clients follow the plan of the method; allowed: init with plan=None")
        return State(RemoteServer(server.round, server.params, clients.logits), clients._replace(logits=None))

    def client_step(
        self, round: Round, hparams: Any, server: Any, client: Client, data: Any
    ) -> tuple[Client, Message, Array]:
        """Local training of one client; `server.params` is the `Download` that `read_down` returns."""
        download = server.params
        if client.head is not None:  # the download has no head if the client keeps its own
            download = download._replace(params=layers.join(client.head, download.params))
        model, loss = self.method.train(round.client_key, hparams, download, client, data)
        return client._replace(head=self.method.head(model)), round.send(model), loss

    def joined(self, key: Key, hparams: Any, server: RemoteServer, ids: Any, models: Params) -> RemoteServer:
        """The server's step; `models` has a leading axis, one row for each of `ids`."""
        method, learns = self.method, self.method.aggregate.steps > 0
        updates = jax.tree.map(lambda rows, leaf: rows - leaf[None], models, server.params)
        table = server.logits
        if not learns:
            table = jnp.asarray(method.aggregate.logits(method.plan.trained), jnp.zeros(()).dtype)
        uploads = Uploads(updates, jnp.asarray(method.plan.trained)[ids], table[ids], members=len(ids))
        move, logits = aggregation.aggregated(method.aggregate, method.loss, method.plan.layers, server.params, uploads)
        kept = server.logits.at[ids].set(logits) if learns else server.logits
        return server_step(hparams, server, move)._replace(logits=kept)

    def _format(self, client: int, params: Params) -> submodels.Format:
        return submodels.format_of(self.method.plan, client, params, **self.method.format_options())

    def _sent(self, key: Key, client: int, download: Download) -> tuple[Params, submodels.Masks]:
        """What the client receives, and its masks; `key` is the key of the round."""
        method, plan = self.method, self.method.plan
        ratio = int(np.searchsorted(layers.ratios(plan), plan.keep[client]))
        masks_key = client_keys(jax.random.fold_in(key, client), method.steps).masks
        return submodels.sent(plan, plan.trained[client], masks_key, ratio, download.params, download.masks)

    def write_down(self, key: Key, server: RemoteServer, ids: list[int], n: int) -> list[bytes]:
        """The downloads of the given clients."""
        key_server = jax.random.fold_in(key, n + 1)  # as in `rounds.keys`
        masks = submodels.server_masks(self.method.plan, self.method.pruning, key_server, server.params)
        download = Download(server.params, masks)
        return [
            wire.write_down(self._format(client, server.params), *self._sent(key, client, download)) for client in ids
        ]

    def read_down(self, key: Key, data: bytes, server: Any, client: int, n: int) -> Download:
        """The params, and the masks in the form of `submodels.server_masks`, the same for all ratios."""
        plan, params, none = self.method.plan, server.params, [None for _ in self.method.plan.layers.of]
        drawn = self.method.pruning.score is None
        masks = self._sent(key, client, Download(params, none))[1] if drawn else None
        sent, masks = wire.read_sent(self._format(client, params), data, params, masks)
        if drawn:  # the local training draws the masks again
            return Download(sent, none)
        number = len(layers.ratios(plan))
        wanted = zip(masks, submodels.pruned_leaves(plan, params), jax.tree.leaves(params), strict=True)
        whole = [jnp.ones(leaf.shape, bool) if yes and mask is None else mask for mask, yes, leaf in wanted]
        return Download(sent, [None if mask is None else jnp.stack([mask] * number) for mask in whole])

    def write_up(self, key: Key, model: Params, client: int, n: int) -> bytes:
        """The upload of a client."""
        return wire.write_up(self._format(client, model), model)

    def read_up(self, key: Key, data: bytes, server: Any, client: int, n: int) -> Params:
        """The client's model: the layers of the upload, and W elsewhere."""
        return layers.join(wire.read_up(self._format(client, server.params), data, server.params), server.params)

    def bits(self, way: int, server: Any, client: int) -> float:
        """Bits of an upload (`way` 0) or of a download (1)."""
        leaves, structure = jax.tree.flatten(server.params)
        shapes = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        return float(_ledger(self.method, shapes, structure)["up" if way == 0 else "down"][client])

    def bits_down(self, server: Any) -> float:
        """Mean bits of a download."""
        return float(np.mean([self.bits(1, server, client) for client in range(len(self.method.plan.keep))]))


@cache
def _ledger(method: Method, shapes: tuple[Any, ...], structure: Any) -> dict[str, np.ndarray]:
    return method.ledger(structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes]))
