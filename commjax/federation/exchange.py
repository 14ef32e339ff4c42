"""A round with remote clients: what the server and a client do with bytes.  The network is not part of this module.

    server   downloads(contract, server, counted)         ->  one sealed download for each client that takes part
    client   answer(contract, id, data, memory, download) ->  the client's new memory, and its sealed upload
    server   close(contract, server, uploads)             ->  the next server state, and a report

See `commjax.federation.flower` for a network.

The payload of an upload is `compressor.encode`.  The payload of a download is the raw leaves of the fields
`Exchange.down`.  A method may replace both by codecs (`Exchange.download` and `Exchange.upload`).  Both have exactly
the bits that the simulation counts.  Client and server add the same decoded message, so h = mean_i h_i holds bit for
bit.  A client commits a round only when the next download says that its upload was counted.  An upload that comes too
late therefore changes nothing on either side.

A message with numbers that are not finite or too large (`rounds.acceptable`) is refused.  A refused upload counts as
absent.  If a server step gives params that are not finite, `close` raises a `DivergedError`, and the server state that
was given to it is the last good one.  With a reducer of `commjax.core.robust` the server reduces the messages that it
accepted, however many clients are absent.

Privacy.  All parties know the contract's key, so a method that hides data behind noise (`Exchange.private`: LDP-FedP3)
must not draw the noise from it.  For every answer a client draws a new secret key from the operating system and then
forgets it.  Nobody can compute the rows and the noise of a round afterwards, not even the client.  A client answers
each of `Contract.rounds` rounds once, so a server that asks again, or for more rounds, learns nothing beyond
`accounting.guarantee(noise, rate, rounds, delta)`.  The client sends nan instead of its loss.  This protection has
limits: the client's `Memory` counts the rounds of one run only, the secret has 64 bits, and neither JAX's generator
(threefry) nor floating-point noise is cryptographically secure.
"""

from commjax.federation.client import Memory, answer, first_memory
from commjax.federation.contract import Contract, exchange_of, fingerprint, members, start
from commjax.federation.server import AbsentError, Report, close, downloads

__all__ = [
    "AbsentError",
    "Contract",
    "Memory",
    "Report",
    "answer",
    "close",
    "downloads",
    "exchange_of",
    "fingerprint",
    "first_memory",
    "members",
    "start",
]
