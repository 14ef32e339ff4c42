"""The cohort of a round: the clients that take part, drawn from a key that all parties share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from commjax.core.base import AxisName, Key
from commjax.core.communication import column, count


class Members(NamedTuple):
    """The clients that take part in a round.

    `cohort` draws them without replacement from a key that all parties share.  Without a device axis only the rows of
    the members are read and written.  With one, every device works on all of its rows, because the number of members on
    it is not known when the program is compiled.

    Attributes:
        member: for each row on this device, whether the client takes part; None if all do.
        at: positions of the members, without a device axis; else None.
        weights: weights with which `mean` is the mean over the members; None is 1 for each row.
    """

    member: Bool[Array, "n"] | None = None
    at: Int[Array, "m"] | None = None
    weights: Shaped[Array, "n"] | None = None

    def take(self, rows: PyTree) -> PyTree:
        """Select the rows that this device works on."""
        return rows if self.at is None else jax.tree.map(lambda leaf: leaf[self.at], rows)

    def put(self, rows: PyTree, new: PyTree) -> PyTree:
        """Replace the rows of the members by `new`."""
        if self.member is None:
            return new
        if self.at is not None:
            return jax.tree.map(lambda leaf, value: leaf.at[self.at].set(value), rows, new)
        member = self.member
        return jax.tree.map(lambda old, value: jnp.where(column(member, old), value, old), rows, new)


def check_cohort(size: int | None) -> None:
    """Raise a ValueError unless `size` is None or at least 1."""
    if size is not None and size < 1:
        raise ValueError(f"cohort must be at least 1 client (or None for all), got {size}")


def cohort_members(key: Key, ids: Shaped[Array, "m"], n: int, size: int) -> Bool[Array, "m"]:
    """Say which of the given clients belong to the cohort that `key` draws.

    Args:
        key: key of the draw, the same for all parties.
        ids: numbers of the clients in question, from 0 to n - 1.
        n: number of clients.
        size: number of members of the cohort, drawn uniformly without replacement.

    Returns:
        A bool for each of `ids`.

    >>> int(cohort_members(jax.random.key(0), jnp.arange(10), 10, 3).sum())
    3
    """
    if not 1 <= size <= n:
        raise ValueError(f"cohort must be between 1 and the number of clients, got {size} of {n}")
    return jax.random.permutation(key, n)[ids] < size


def cohort(key: Key, ids: Shaped[Array, "n"], size: int | None, axis_name: AxisName = None) -> Members:
    """Draw the cohort of a round.

    Args:
        key: key of the draw, the same for all parties.
        ids: ids on this device.
        size: number of members; None is all clients.
        axis_name: the device axis; None if there is none.

    Returns:
        The members: for each row on this device whether its client takes part, and the weights of the mean over them.
    """
    n = count(ids, axis_name)
    if size is None or size == n:
        return Members()
    member = cohort_members(key, ids, n, size)
    if axis_name is None:
        return Members(member, jnp.nonzero(member, size=size)[0], None)
    return Members(member, None, jnp.where(member, n / size, 0.0))
