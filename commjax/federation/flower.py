"""Run a method that communicates once a round as a Flower ServerApp and ClientApp (extra `flower`).

    client_app(contract, data)            a SuperNode with `--node-config "partition-id=I"` loads the data of client I
    server_app(contract, rounds=...)      exchanges a download and an upload with every client of a round's cohort

`contract(config)` and `data(config, id)` get the run's configuration (`[tool.flwr.app.config]`, `--run-config`).  Every
message is one sealed record of bytes (`commjax.federation.envelope`) with the payload of `commjax.federation.exchange`.
Flower transports it, with TLS and authentication (BUILD.md).
"""

import importlib
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from commjax.federation import exchange
from commjax.federation.envelope import Header, RefusedError, seal, unseal
from commjax.federation.exchange import AbsentError, Contract, Memory, Report

Config = Mapping[str, Any]
ID = "partition-id"  # the name that Flower uses
_RECORD = "commjax"
_REFUSED = 1000  # error code of commjax in messages of Flower
_PAUSE = 0.2  # seconds between two polls of the grid


def _flwr() -> SimpleNamespace:
    try:
        app, client, server = (importlib.import_module(f"flwr.{name}") for name in ("app", "clientapp", "serverapp"))
    except ImportError as error:
        raise ImportError(
            "commjax.federation.flower needs the extra 'flower': pip install 'commjax[flower]'"
        ) from error
    return SimpleNamespace(**{**vars(app), "ClientApp": client.ClientApp, "ServerApp": server.ServerApp})


def _sealed(message: Any) -> bytes:
    """Return the bytes of a message, or empty bytes, which are refused later, if the message has another form."""
    data = message.content[_RECORD].get("message") if _RECORD in message.content else None
    return data if isinstance(data, bytes) else b""


def _agreed(contract: Callable[[Config], Contract], context: Any) -> Contract:
    return contract(context.run_config)._replace(run=context.run_id)


def _client_id(context: Any, n: int) -> int:
    id = context.node_config.get(ID)
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < n:
        raise RefusedError(f'--node-config must have "{ID}=I", I an integer from 0 to {n - 1}, got {id!r}')
    return id


def client_app(contract: Callable[[Config], Contract], data: Callable[[Config, int], PyTree]) -> Any:
    """Make the ClientApp.  The client's memory is stored in Flower's `context.state`.

    Args:
        contract: (config) -> Contract, the same as that of the server.
        data: (config, id) -> data of this client, without a client axis.

    Returns:
        A `flwr.clientapp.ClientApp`.
    """
    flwr = _flwr()
    app = flwr.ClientApp()

    def reply_to(message: Any, answer: Callable[[bytes], bytes]) -> Any:
        try:
            sealed = answer(_sealed(message))
        except RefusedError as error:
            return flwr.Message(flwr.Error(_REFUSED, f"refused: {error}"), reply_to=message)
        return flwr.Message(flwr.RecordDict({_RECORD: flwr.ConfigRecord({"message": sealed})}), reply_to=message)

    @app.query("hello")
    def hello(message: Any, context: Any) -> Any:
        def answer(download: bytes) -> bytes:
            agreed = _agreed(contract, context)
            run = exchange.fingerprint(agreed)
            unseal(download, kind="hello", run=run, limit=0)
            return seal(Header("hello", run, 0, _client_id(context, agreed.n)), b"")

        return reply_to(message, answer)

    @app.query("round")
    def client_round(message: Any, context: Any) -> Any:
        def answer(download: bytes) -> bytes:
            agreed = _agreed(contract, context)
            id = _client_id(context, agreed.n)
            known = _RECORD in context.state
            memory = Memory(**context.state[_RECORD]) if known else exchange.first_memory(agreed, id)
            rows = jax.tree.map(jnp.asarray, data(context.run_config, id))
            memory, sealed = exchange.answer(agreed, id, rows, memory, download)
            context.state[_RECORD] = flwr.ConfigRecord(memory._asdict())
            return sealed

        return reply_to(message, answer)

    return app


def server_app(
    contract: Callable[[Config], Contract],
    *,
    rounds: Callable[[Config], int],
    timeout: Callable[[Config], float] = lambda config: 120.0,
    on_round: Callable[[Config, Any, Report], None] = lambda config, server, report: None,
) -> Any:
    """Make the ServerApp, which runs all rounds of a federation.

    Args:
        contract: (config) -> Contract, the same as that of the clients.
        rounds: (config) -> number of rounds.
        timeout: (config) -> seconds to wait for all SuperNodes at the start, and for the uploads of a round.
        on_round: (config, server, report) -> None, called after each round with the new server state.

    Returns:
        A `flwr.serverapp.ServerApp`.
    """
    flwr = _flwr()
    app = flwr.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        config = context.run_config

        def seen(server: Any, report: Report) -> None:
            print(f"round {int(server.round)}: {report}", flush=True)
            on_round(config, server, report)

        drive(flwr, grid, _agreed(contract, context), rounds(config), timeout(config), seen)

    return app


def drive(
    flwr: Any, grid: Any, contract: Contract, rounds: int, timeout: float, seen: Callable[[Any, Report], None]
) -> Any:
    """Run rounds on Flower's grid.

    The server still sends downloads to a client that was absent in the last round, but does not wait for its upload.

    Args:
        flwr: the classes of Flower that are used (`Message`, `RecordDict`, `ConfigRecord`).
        grid: Flower's grid.
        contract: the contract of the run.
        rounds: number of rounds.
        timeout: seconds to wait for all SuperNodes at the start, and for the uploads of a round.
        seen: (server, report) -> None, called after each round.

    Returns:
        The last server state.
    """
    nodes = _roll_call(flwr, grid, contract, timeout)
    server = exchange.start(contract, jnp.arange(contract.n)).server
    counted: dict[int, int] = {}
    missing: set[int] = set()
    for round in range(rounds):
        downloads = exchange.downloads(contract, server, counted)
        asked = {i: (nodes[i], download) for i, download in downloads.items()}
        patient = set(downloads) - missing
        uploads, reasons = _ask(flwr, grid, "query.round", asked, timeout, lambda heard, _, who=patient: who <= heard)
        server, report = exchange.close(contract, server, uploads, reasons)
        missing = set(report.absent)
        counted |= {i: round for i in uploads if i not in missing}
        seen(server, report)
    return server


def _roll_call(flwr: Any, grid: Any, contract: Contract, timeout: float) -> dict[int, int]:
    """Wait for all n clients, and return the node id of each client id."""
    n, run = contract.n, exchange.fingerprint(contract)
    until = time.monotonic() + timeout
    while len(online := sorted(grid.get_node_ids())) < n:
        if time.monotonic() > until:
            raise AbsentError(f"{len(online)} of {n} SuperNodes are online after {timeout:g} s")
        time.sleep(_PAUSE)
    download = seal(Header("hello", run, 0, 0), b"")
    asked = {node: (node, download) for node in online}  # a node that has just died may still be listed

    def opened(upload: bytes) -> int | str:
        """Return the id of the client that sent the upload, or the reason why it is refused."""
        try:
            id = unseal(upload, kind="hello", run=run, limit=0)[0].client
        except RefusedError as error:
            return str(error)
        return id if id < n else f"of no client: {ID} must be 0 to {n - 1}, got {id}"

    def complete(heard: set[int], uploads: dict[int, bytes]) -> bool:
        return heard == set(asked) or len({id for id in map(opened, uploads.values()) if isinstance(id, int)}) >= n

    uploads, reasons = _ask(flwr, grid, "query.hello", asked, timeout, complete)
    nodes: dict[int, int] = {}
    for node, upload in uploads.items():
        id = opened(upload)
        if isinstance(id, str):
            reasons[node] = id
        elif id in nodes:
            raise ValueError(f"{ID} must be of one SuperNode, got {id} from nodes {nodes[id]} and {node}")
        else:
            nodes[id] = node
    if len(nodes) < n:
        raise AbsentError(f"no SuperNode answers for clients {sorted(set(range(n)) - set(nodes))}: {reasons}")
    return nodes


def _ask(
    flwr: Any,
    grid: Any,
    kind: str,
    downloads: Mapping[int, tuple[int, bytes]],
    timeout: float,
    enough: Callable[[set[int], dict[int, bytes]], bool],
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Send messages, and wait for the answers until `enough(names that answered, answers)` or the timeout.

    `downloads` is name -> (node, bytes).  Returns the answers by name, and the reasons for missing ones by name.
    """

    def message(node: int, download: bytes) -> Any:
        content = flwr.RecordDict({_RECORD: flwr.ConfigRecord({"message": download})})
        return flwr.Message(content, node, kind, ttl=2 * timeout)  # longer than the timeout of this function

    pushed = grid.push_messages([message(*download) for download in downloads.values()])
    names = {id: name for id, name in zip(pushed, downloads) if id is not None}
    reasons = {name: f"no answer within {timeout:g} s" for name in names.values()}
    reasons = {name: reasons.get(name, "the SuperLink did not take the message") for name in downloads}
    uploads: dict[int, bytes] = {}
    heard = set(downloads) - set(names.values())
    until = time.monotonic() + timeout
    while not enough(heard, uploads) and time.monotonic() < until:
        time.sleep(_PAUSE)
        for answer in grid.pull_messages(list(names)):
            name = names.pop(answer.metadata.reply_to_message_id)
            heard.add(name)
            if answer.has_error():
                reasons[name] = str(answer.error.reason)
            else:
                uploads[name] = _sealed(answer)
    return uploads, {name: why for name, why in reasons.items() if name not in uploads}
