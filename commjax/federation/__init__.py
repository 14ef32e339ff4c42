"""A server and clients that exchange bytes.

contract        what server and clients agree on before the first message
fingerprint     a digest of a function's source and closure, to compare the code of server and clients
envelope        a header with run, round, client, length and checksum before a payload
exchange        one round as bytes: downloads, uploads, the new server state
flower          the same as a Flower ServerApp and ClientApp
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.federation import contract, envelope, exchange, fingerprint, flower

__all__ = ["contract", "envelope", "exchange", "fingerprint", "flower"]

__getattr__, __dir__ = submodules(__name__, __all__)
