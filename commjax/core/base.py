"""The five tuples that every method is made of.

An algorithm is a pair of pure functions over pytrees, a compressor a member of C(eta, omega).  Nothing here computes: see
`commjax.core.rounds` for the round, `commjax.core.runner` for time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree, Shaped

# Aliases say what an argument means.  Typed keys (`jax.random.key`) only.
Key = Shaped[Array, "..."]
Params = PyTree
ClientId = int | Shaped[Array, ""]


class State(NamedTuple):
    """Everything that a method remembers, in two places.

    `server` is replicated and has at least `round` and `params`; every leaf of `clients` has a leading axis, one row per
    client, and `clients.id` numbers the rows.  `State(P(), P("clients"))` is therefore a prefix for `shard_map` and
    `State(None, 0)` one for `pmap`.
    """

    server: Any
    clients: Any


class Metrics(NamedTuple):
    """What one round reports.  Bits are per round; the host adds them up in float64 (`commjax.core.records`).

    Bits are numbers of the default float dtype: without `jax_enable_x64` they are rounded above 2^24.  They are a report only.  What a
    server accepts or refuses depends on `Compressor.length` and on the bytes that arrived, which are exact integers.
    """

    loss: Shaped[Array, "..."]  # mean client loss at the params with which the round began
    bits_up: Shaped[Array, "..."]  # sent by one client in this round, mean over clients
    bits_down: Shaped[Array, "..."]  # sent to one client in this round


class Message(NamedTuple):
    """A vector (or pytree) as the receiver sees it, and its bits: 8 * len(encode(...)), as a float (see `Metrics`)."""

    value: PyTree
    bits: Shaped[Array, "..."]


class Constants(NamedTuple):
    """The class C(eta, omega) of n compressors and their average relative variance omega_ran.

        | E C(x) - x |          <= eta |x|
        E | C(x) - E C(x) |^2   <= omega |x|^2
        E | mean_i (C_i(x_i) - E C_i(x_i)) |^2  <=  omega_ran mean_i |x_i|^2

    Thesis: Sect. 2.2.1 and 2.2.2 (L767-L833).
    """

    eta: float
    omega: float
    omega_ran: float


class Compressor(NamedTuple):
    """A randomised map on pytrees, seen as one long vector of R^d (or leaf by leaf, see `compressors.leafwise`).

    `key` is the key of the round and is *shared by all parties*: an independent compressor folds `id` into it, a joint one
    (m-nice, perm-k) draws one event from it that all `n` clients agree on.  The receiver knows the key as well, so what is
    drawn from it costs no bits.
    """

    name: str
    compress: Callable[..., Message]  # (key, x, id=0, n=1) -> Message, pure and jittable
    constants: Callable[..., Constants]  # (d, n=1) -> Constants
    encode: Callable[..., bytes]  # (key, x, id=0, n=1) -> what the client sends for x; on the host
    decode: Callable[..., PyTree]  # (key, data, like, id=0, n=1) -> compress(key, x, id, n).value
    kept: Callable[..., float]  # (d, n=1) -> values in a message on average, for the legacy conventions
    # (xs: np.ndarray [n, d]) -> (probabilities [m], values [m, n, d]): the exact joint law, for small d and n, on the host
    outcomes: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    absence: bool = False  # is "nothing was sent, 0 is assumed" one of its outcomes?  Then a client may stay away
    # (key, like, id=0, n=1) -> len(encode(key, x, id, n)) for every x like `like`, an exact int, on the host
    length: Callable[..., int] | None = None


class Reducer(NamedTuple):
    """How the server makes one message of many, where that is not their mean (`commjax.core.robust`).

    `reduce(rows, present)` takes a pytree whose leaves have a leading axis of messages, and a bool for each message that says whether
    it counts; it returns a pytree without that axis.
    """

    name: str
    reduce: Callable[[PyTree, Shaped[Array, "n"]], PyTree]


class Round(NamedTuple):
    """Who speaks, when, and how: what a client knows of the federation.  `key` is shared; `own_key` is the client's: everybody can
    compute it from `key`, unless the client has a `secret`, as it has in a federation with a private method (`commjax.federation.exchange`).

    `send(x)` is the one way up: it compresses x in a simulation and really sends it in a federation (`commjax.federation.flower`).
    """

    key: Key
    id: ClientId
    n: int
    send: Callable[[PyTree], Message]
    secret: Key | None = None
    run: Key | None = (
        None  # of the whole run, of which `key` is this round's; for methods whose rounds are not their own (Scafflix's coins)
    )

    @property
    def own_key(self) -> Key:
        return jax.random.fold_in(self.key if self.secret is None else self.secret, self.id)


InitFn = Callable[..., State]  # (params, ids, **per_client)
StepFn = Callable[
    ..., tuple[State, Any]
]  # metrics: `Metrics`, or more fields after them; (key, hparams, state, batch, *, axis_name=None)


class Codec(NamedTuple):
    """How a message is written that depends on the client: FedP3's layers.  Nothing is lost that the other side uses."""

    bits: Callable[[Any, int], float]  # (server, id) -> its price
    write: Callable[
        ..., Any
    ]  # down: (key, server, ids, n) -> bytes for each of them; up: (key, x, id, n) -> bytes.  key: the round's
    read: Callable[
        ..., Any
    ]  # (key, data, server, id, n) -> down: the fields `down` (one: itself, more: a tuple); up: x


class Exchange(NamedTuple):
    """The two halves of a method that exchanges once a round, for whoever runs them in two places (`commjax.federation.flower`).

    The second part is for methods that are no `clients.federated`, and for letters that are not the same to all.
    """

    client_step: Callable[..., tuple[Any, Message, Any]]  # (round, hparams, server, client, data)
    server_step: Callable[..., Any] | None  # (hparams, server, mean of the messages)
    bits_down: Callable[[Any], float]  # (server) -> price of what a client receives
    down: tuple[str, ...]  # the fields of `server` that a client receives; a message up has their structure
    compressor: Compressor | None  # of the messages; None: as they are
    cohort_size: int | None  # how many take part in a round; None: all
    private: bool = False  # `own_key` must be secret and the loss must not be sent: what it hides is a client's data

    letter: Codec | None = None  # down; None: the fields as they are
    reply: Codec | None = None  # up; None: the compressor's encoding
    members: Callable[..., Any] | None = (
        None  # (key, round, n) -> ids of those who take part; None: `cohort_size` at random
    )
    joined: Callable[..., Any] | None = (
        None  # (key, hparams, server, ids, messages) -> server; None: `server_step` of their mean
    )
    start: Callable[[State], State] | None = None  # what each side remembers, where that is not what `init` makes
    commit: Callable[..., Any] | None = (
        None  # (hparams, server, client) -> client, at the letter after a message that was counted
    )
    reduce: Reducer | None = None  # of the messages that `server_step` gets; None: their mean


class Spec(NamedTuple):
    """What an algorithm takes, so that a run can refuse everything else before it begins (`commjax.core.checks`)."""

    hparams: type
    server: type  # of `State.server`
    client: type  # of `State.clients`
    check: Callable[
        [Any, int], None
    ]  # (hparams, n): a ValueError for a value that is not allowed; traced values are skipped


class Algorithm(NamedTuple):
    """`init(params, ids, **per_client) -> State` and `step(key, hparams, state, batch, *, axis_name=None)`.

    `step` takes the key of the *run* and derives the round's from `state.server.round`, so no key lives in a state, and a
    run resumes from its state alone.  `hparams` is a pytree of numbers, so a sweep over it is one `vmap`.
    """

    init: InitFn
    step: StepFn
    exchange: Exchange | None = None  # the halves of `step`, where it has such
    spec: Spec | None = None  # None: nothing is known of its hparams and state
