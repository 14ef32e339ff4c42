"""The tuples of compression: a message, a compressor, and the signatures of a compressor's functions."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, PyTree, Shaped

# Keys are typed keys (`jax.random.key`).
Key = Shaped[Array, "..."]
ClientId = int | Shaped[Array, ""]


class Message(NamedTuple):
    """A vector or pytree as the receiver sees it, with its number of bits.

    Attributes:
        value: the decoded pytree.
        bits: 8 * len(encode(...)), as a float (see `Metrics`).
    """

    value: PyTree
    bits: Shaped[Array, "..."]


class Constants(NamedTuple):
    """The class C(eta, omega) of n compressors C_i on R^d, and the relative variance omega_ran of their mean.

        | E C_i(x) - x |            <= eta |x|
        E | C_i(x) - E C_i(x) |^2   <= omega |x|^2
        E | mean_i (C_i(x_i) - E C_i(x_i)) |^2  <=  omega_ran mean_i |x_i|^2

    Thesis: Sec. 2.2.1 and 2.2.2.

    Attributes:
        eta: relative bias.
        omega: relative variance of one compressor.
        omega_ran: relative variance of the mean over the clients.
    """

    eta: float
    omega: float
    omega_ran: float


@runtime_checkable
class CompressFn(Protocol):
    """Compress x as client `id` of n does."""

    def __call__(self, key: Key, x: PyTree, /, id: ClientId = 0, n: int = 1) -> Message:
        """Return C(x) and its bits.  `key` is the key of the round."""
        ...


@runtime_checkable
class ConstantsFn(Protocol):
    """The class of a compressor."""

    def __call__(self, d: int, /, n: int = 1) -> Constants:
        """Return eta, omega and omega_ran for vectors of R^d and n clients."""
        ...


@runtime_checkable
class EncodeFn(Protocol):
    """Encode x as client `id` of n does."""

    def __call__(self, key: Key, x: PyTree, /, id: ClientId = 0, n: int = 1) -> bytes:
        """Return the bytes that the client sends."""
        ...


@runtime_checkable
class DecodeFn(Protocol):
    """Decode what client `id` of n has encoded."""

    def __call__(self, key: Key, data: bytes, like: PyTree, /, id: ClientId = 0, n: int = 1) -> PyTree:
        """Return a pytree with the shapes and dtypes of `like`."""
        ...


@runtime_checkable
class LengthFn(Protocol):
    """The length of an encoded message."""

    def __call__(self, key: Key, like: PyTree, /, id: ClientId = 0, n: int = 1) -> int:
        """Return the number of bytes for every x with the shapes and dtypes of `like`."""
        ...


@runtime_checkable
class KeptFn(Protocol):
    """The number of values in a message."""

    def __call__(self, d: int, /, n: int = 1) -> float:
        """Return the mean number of values for vectors of R^d and n clients."""
        ...


class Compressor(NamedTuple):
    """A randomised map on pytrees.

    The pytree is treated as one vector of R^d, or leaf by leaf (see `compressors.leafwise`).  `key` is the key of the
    round and is *shared by all parties*.  An independent compressor folds `id` into it.  A joint compressor (m-nice,
    perm-k) draws one event from it for all `n` clients.  The receiver knows the key as well, so what is drawn from it
    costs no bits.

    Attributes:
        name: the name with its parameters, such as "top-3".
        compress: (key, x, id=0, n=1) -> Message, pure and jittable.
        constants: (d, n=1) -> Constants, for vectors of R^d and n clients.
        encode: (key, x, id=0, n=1) -> the bytes that client `id` sends for x; on the host.
        decode: (key, data, like, id=0, n=1) -> compress(key, x, id, n).value; on the host.
        kept: (d, n=1) -> mean number of values in a message, for the legacy bit counts (`commjax.core.conventions`).
        outcomes: (xs [n, d]) -> (probabilities [m], values [m, n, d]), the exact joint law for small d and n, as NumPy
            arrays on the host; None if it is not known.
        absence: whether one of the outcomes is "nothing is sent, and the receiver assumes 0".  A client may then be
            absent.
        length: (key, like, id=0, n=1) -> len(encode(key, x, id, n)), an exact int, the same for every x with the shapes
            and dtypes of `like`; on the host.  None if it is not known.
    """

    name: str
    compress: CompressFn
    constants: ConstantsFn
    encode: EncodeFn
    decode: DecodeFn
    kept: KeptFn
    outcomes: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    absence: bool = False
    length: LengthFn | None = None
