"""A server and clients that exchange bytes.

contract        what both sides agree on before the first message
fingerprint     a digest of code and data, so that two sides can compare theirs
envelope        a header with length, round, client and checksum around a payload
exchange        one round in two places: downloads, answers, the new server state
flower          the same as a Flower ServerApp and ClientApp
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.federation import contract, envelope, exchange, fingerprint, flower

__all__ = ["contract", "envelope", "exchange", "fingerprint", "flower"]

__getattr__, __dir__ = submodules(__name__, __all__)
