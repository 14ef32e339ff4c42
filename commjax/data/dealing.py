"""Deal rows to clients: sizes in proportion to shares, pieces of these sizes, and draws until all are large enough."""

from collections.abc import Callable, Sequence

import numpy as np


def proportional_sizes(total: int, shares: np.ndarray) -> np.ndarray:
    """Return whole numbers in proportion to ``shares`` that sum to ``total``: the largest remainders are rounded up."""
    exact = total * shares / shares.sum()
    sizes = np.floor(exact).astype(int)
    largest = np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]
    sizes[largest] += 1
    return sizes


def deal(ids: np.ndarray, sizes: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Cut ``ids`` into consecutive pieces of the given sizes. Ids beyond the sum of the sizes are dropped."""
    ends = np.cumsum(sizes)
    return [ids[end - size : end] for end, size in zip(ends, sizes)]


def redraw(
    draw: Callable[[], list[np.ndarray]], n: int, concentration: float, minimum: int, tries: int
) -> list[np.ndarray]:
    """Call ``draw`` at most ``tries`` times, and return the first result that gives each client ``minimum`` rows.

    Args:
        draw: Function that returns the row ids of each of n clients.
        n: The number of clients.
        concentration: The parameter of the Dirichlet distribution of ``draw``, for the error text.
        minimum: The smallest number of rows of a client.
        tries: The largest number of draws.

    Returns:
        The row ids of each client. If no draw suffices, a ValueError is raised.
    """
    if n < 1 or tries < 1 or minimum < 1:
        raise ValueError(f"n={n}, tries={tries}, minimum={minimum}; allowed: at least 1 each")
    if not (np.isfinite(concentration) and concentration > 0):
        raise ValueError(f"concentration={concentration}; allowed: finite and > 0")
    for _ in range(tries):
        rows = draw()
        if min(map(len, rows)) >= minimum:
            return rows
    raise ValueError(
        f"a client had fewer than minimum={minimum} rows in each of tries={tries} Dirichlet draws with "
        f"concentration={concentration} for n={n} clients; allowed: what a draw can give"
    )
