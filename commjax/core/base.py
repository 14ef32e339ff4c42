"""The tuples that every method is made of.

An algorithm is a pair of pure functions over pytrees.  A compressor is a member of C(eta, omega).  This module only
defines types: `commjax.core.rounds` computes a round, and `commjax.core.runner` runs many of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from commjax.core.compression import ClientId, Compressor, Constants, Key, Message

__all__ = [
    "Algorithm",
    "Axis",
    "AxisName",
    "ClientId",
    "ClientStep",
    "Codec",
    "CommitFn",
    "Compressor",
    "Constants",
    "Exchange",
    "InitFn",
    "JoinFn",
    "Key",
    "MembersFn",
    "Message",
    "Metrics",
    "Over",
    "Params",
    "Reducer",
    "Round",
    "ServerStep",
    "Spec",
    "State",
    "StepFn",
    "ValueAndGrad",
]

Params = PyTree
# (params, data of one client) -> (loss, gradient like params)
ValueAndGrad = Callable[[Params, Any], tuple[Array, Params]]
# Maps a function of one client over the leading client axis: `jax.vmap` or `rounds.one_by_one`.
Over = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Axis:
    """A named axis of devices over which the clients are split, and whose last rows are padding.

    Attributes:
        name: the name of the axis.
        n: number of clients; the rows from n on are padding.
    """

    name: str
    n: int


# A device axis: its name, or an `Axis` if the last rows are padding; None if there is none.
AxisName = str | Axis | None


class State(NamedTuple):
    """Everything that a method remembers, split into the server's part and the clients' part.

    Because of the split, `State(P(), P("clients"))` is a prefix of specs for `shard_map`, and `State(None, 0)` for
    `pmap`.

    Attributes:
        server: a NamedTuple with at least `round` and `params`; replicated on all devices.
        clients: a NamedTuple whose leaves have a leading axis, one row per client; `clients.id` numbers the rows.
    """

    server: Any
    clients: Any


class Metrics(NamedTuple):
    """The numbers that one round reports.

    Bits are counted per round; the host adds them up in float64 (`commjax.core.records`).  They have the default float
    dtype: without `jax_enable_x64` they are rounded above 2^24.  They are a report only: what a server accepts or
    refuses depends on `Compressor.length` and on the bytes that arrived, which are exact integers.

    Attributes:
        loss: mean client loss at the params with which the round began.
        bits_up: bits that one client sent in this round, as the mean over clients.
        bits_down: bits that were sent to one client in this round, as the mean over clients.
    """

    loss: Shaped[Array, "..."]
    bits_up: Shaped[Array, "..."]
    bits_down: Shaped[Array, "..."]


class Reducer(NamedTuple):
    """An aggregation of the clients' messages that the server uses instead of the mean (`commjax.core.robust`).

    Attributes:
        name: the name with its parameters, for error messages.
        reduce: (rows, present) -> one message.  The leaves of `rows` have a leading axis of n messages; the result has
            the same structure without that axis.  `present` [n] is a bool for each message that says whether it counts.
    """

    name: str
    reduce: Callable[[PyTree, Shaped[Array, "n"]], PyTree]


class Round(NamedTuple):
    """What a client knows about the current round.

    Attributes:
        key: key of the round, shared by all parties.
        id: the client's number.
        n: number of clients.
        send: x -> Message.  The only way to send x to the server: a simulation compresses x, a federation also
            transmits it (`commjax.federation.flower`).
        secret: key that only this client knows.  None outside a federation, and for methods that are not private.
        run: key of the whole run.  Scafflix needs it: its coins are drawn per iteration, not per round.
    """

    key: Key
    id: ClientId
    n: int
    send: Callable[[PyTree], Message]
    secret: Key | None = None
    run: Key | None = None

    @property
    def client_key(self) -> Key:
        """Key of this client in this round.

        Everybody can compute it from `key`, unless the client has a `secret` (`commjax.federation.exchange`).
        """
        return jax.random.fold_in(self.key if self.secret is None else self.secret, self.id)


@runtime_checkable
class InitFn(Protocol):
    """Make the first state of a method."""

    def __call__(self, params: Params, ids: Any, /, *rest: Any, **per_client: Any) -> State:
        """Return the state of the server and of the clients `ids` [n].

        `per_client` are options of the method, with one row for each client.
        """
        ...


@runtime_checkable
class StepFn(Protocol):
    """One round of a method."""

    def __call__(
        self, key: Key, hparams: Any, state: State, batch: PyTree, /, *, axis_name: AxisName = None
    ) -> tuple[State, Any]:
        """Return the next state, and metrics that begin with the fields of `Metrics`.

        The leaves of `batch` have a leading axis, one row for each row of `state.clients`.
        """
        ...


# (round, hparams, server, client, data) -> (client, message, loss), all of one client, without a client axis
ClientStep = Callable[[Round, Any, Any, Any, PyTree], tuple[Any, Message, Array]]
# (hparams, server, the reduced message) -> server
ServerStep = Callable[[Any, Any, PyTree], Any]
# (key of the run, hparams, server, ids [m], messages with a leading axis of m) -> server
JoinFn = Callable[[Key, Any, Any, Shaped[Array, "m"], PyTree], Any]
# (key of the run, round, n) -> ids of the members
MembersFn = Callable[[Key, int, int], Sequence[int] | np.ndarray]
# (hparams, server, client) -> client
CommitFn = Callable[[Any, Any, Any], Any]


class Codec(NamedTuple):
    """Encoder and decoder of a payload that depends on the client, such as the layers of FedP3.

    `key` is the key of the round.  Decoding returns exactly what the receiver uses.

    Attributes:
        bits: (server, id) -> number of bits of the payload.
        write: for a download (key, server, ids, n) -> a list of bytes, one payload for each of `ids`;
            for an upload (key, x, id, n) -> bytes.
        read: (key, data, server, id, n) -> for a download the fields that `Exchange.down` names (one field: its value,
            several: a tuple); for an upload x.
    """

    bits: Callable[[Any, int], float]
    write: Callable[[Key, Any, Any, int], Any]
    read: Callable[[Key, bytes, Any, int, int], Any]


class Exchange(NamedTuple):
    """The client step and the server step of a method that communicates once a round.

    With it, server and clients can run in different processes (`commjax.federation.flower`).  The fields from
    `download` on are for methods that are not built by `rounds.federated`, and for downloads that differ from client to
    client.  `key` in `members` and `joined` is the key that `Algorithm.step` takes.

    Attributes:
        client_step: (round, hparams, server, client, data) -> (client, Message, loss).
        server_step: (hparams, server, mean of the messages) -> server; None if `joined` is given.
        bits_down: (server) -> number of bits that a client receives.
        down: names of the fields of `server` that a client receives.  An upload has the structure of these fields.
        compressor: compressor of the uploads; None sends them uncompressed.
        cohort_size: number of clients in a round; None is all of them.
        private: whether the method hides a client's data.  `Round.client_key` must then be secret, and the loss must
            not be sent.
        download: codec of the downloads; None sends the fields `down` uncompressed.
        upload: codec of the uploads; None uses the encoding of `compressor`.
        members: (key, round, n) -> ids of the clients in this round; None draws `cohort_size` of them at random.
        joined: (key, hparams, server, ids, messages) -> server, where `messages` has a leading axis, one row for each
            of `ids`; None applies `server_step` to the reduced messages.
        start: (state) -> state that a remote server and remote clients begin with; None uses the state of `init`.
        commit: (hparams, server, client) -> client.  A client calls it when it receives a download that confirms its
            last upload.
        reduce: reducer of the messages that `server_step` receives; None is the mean.
    """

    client_step: ClientStep
    server_step: ServerStep | None
    bits_down: Callable[[Any], float]
    down: tuple[str, ...] = ("params",)
    compressor: Compressor | None = None
    cohort_size: int | None = None
    private: bool = False

    download: Codec | None = None
    upload: Codec | None = None
    members: MembersFn | None = None
    joined: JoinFn | None = None
    start: Callable[[State], State] | None = None
    commit: CommitFn | None = None
    reduce: Reducer | None = None


class Spec(NamedTuple):
    """The types and values that an algorithm accepts.

    A run uses it to refuse everything else before it begins (`commjax.core.checks`).

    Attributes:
        hparams: type of the hyperparameters.
        server: type of `State.server`.
        client: type of `State.clients`.
        check: (hparams, n) -> None.  It raises a ValueError for a value that is not allowed, and skips traced values.
    """

    hparams: type
    server: type
    client: type
    check: Callable[[Any, int], None]


class Algorithm(NamedTuple):
    """A method as a pair of pure functions.

    `step` takes the key of the *run* and derives the key of the round from `state.server.round`.  No key lives in a
    state, so a run resumes from its state alone.  `hparams` is a pytree of numbers, so a sweep over it is one `vmap`.

    Attributes:
        init: (params, ids, **per_client) -> State.
        step: (key, hparams, state, batch, *, axis_name=None) -> (State, metrics), one round.
        exchange: client step and server step of `step`; None if the method does not communicate exactly once a round.
        spec: the accepted types and values; None accepts everything.
    """

    init: InitFn
    step: StepFn
    exchange: Exchange | None = None
    spec: Spec | None = None
