"""A server and clients that exchange bytes.

contract        what server and clients agree on before the first message
envelope        a header with run, round, client, length and checksum before a payload
payload         encoders and decoders of downloads and uploads
client          the client's part of a round: answer a download with an upload
server          the server's part of a round: downloads, and the new server state
exchange        one round as bytes: the names of `client` and `server` that a network needs
flower          the same as a Flower ServerApp and ClientApp
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.federation import client, contract, envelope, exchange, flower, payload, server

__all__ = ["client", "contract", "envelope", "exchange", "flower", "payload", "server"]

__getattr__, __dir__ = submodules(__name__, __all__)
