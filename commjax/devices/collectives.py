"""Count what travels between devices: the collectives of a compiled program, and the bytes that a round must send."""

import math
import re
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from commjax.core.base import Algorithm, State


class Collectives(NamedTuple):
    """The communication between devices in a compiled program.

    Attributes:
        counts: how often each operation, such as "all-reduce", occurs in the program.
        bytes: bytes of the results of these operations on one device.
    """

    counts: dict[str, int]
    bytes: int


_OPERATION = re.compile(
    r"= (?P<type>\(?\(?[a-z0-9]+\[.*?) "
    r"(?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")  # f32, bf16, f8e4m3fn, s4


def collectives(compiled: Any) -> Collectives:
    """Count the communication between devices in a compiled program.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`.

    Returns:
        Operations and bytes.  The body of a loop counts once.
    """
    counts: Counter[str] = Counter()
    total = 0
    for operation in _OPERATION.finditer(compiled.as_text()):
        counts[operation["name"]] += 1
        arrays = _ARRAY.findall(operation["type"])
        if operation["start"] and operation["name"] in ("all-gather", "collective-permute"):
            # The type of an asynchronous operation is (operands, results), for a permutation perhaps with u32 contexts
            # at the end.  Drop the contexts and keep the results.
            arrays = [array for array in arrays if array[0] != "u32" or array[2]]
            arrays = arrays[len(arrays) // 2 :]
        for kind, width, shape in arrays:
            bits = {"pred": 8, "token": 0}.get(kind) or int(width or 0)
            total += -(-bits * math.prod(int(length) for length in shape.split(",") if length) // 8)
    return Collectives(dict(counts), total)


def bytes_up(algorithm: Algorithm, hparams: Any, state: State, batch: PyTree) -> int:
    """Return the bytes that a round has to reduce over the devices: one message, its number of bits and one loss.

    On p devices a ring all-reduce sends 2 (p - 1)/p times as many bytes per device.

    Args:
        algorithm: an algorithm with an `exchange` that has a `server_step`.
        hparams: hyperparameters of this algorithm.
        state: a state of this algorithm.
        batch: the data of a round, with a leading client axis.

    Returns:
        The number of bytes.
    """
    if algorithm.exchange is None or algorithm.exchange.server_step is None:
        raise ValueError("algorithm: it exchanges more than once a round, or more than a mean: its bytes are its own")
    loss = jax.eval_shape(partial(algorithm.step, jax.random.key(0)), hparams, state, batch)[1]
    down: Any = {name: getattr(state.server, name) for name in algorithm.exchange.down}
    sent = 0
    if algorithm.exchange.upload is not None:  # the upload has another structure than the download
        down, sent = (), int(algorithm.exchange.upload.bits(state.server, 0)) // 8
    scalars = (loss.loss, loss.bits_up)
    return sent + sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves((down, scalars)))
