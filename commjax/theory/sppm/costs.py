"""Communication costs of SPPM-AS and of LocalGD."""

from commjax.theory.sppm.checks import Number, nonnegative


def cost(c1: Number, c2: Number, K: int, T: int) -> float:
    """Return the communication cost (c1 K + c2) T of T global rounds with K local rounds each.

    Thesis: Sec. 5.4.5.
    Holds if: every cohort is under one hub.
    Differs (docs/errata.md): P11 (a cohort under several hubs costs (c1 + c2) K T).

    Args:
        c1: cost of a local round.
        c2: cost of a global round; 0 (with c1 = 1) for a flat topology.
        K: number of local rounds in a global round.
        T: number of global rounds.

    Returns:
        The cost.

    >>> cost(1, 0, K=10, T=1), cost(0.1, 1, K=10, T=1)
    (10.0, 2.0)
    """
    _check_rounds(c1, c2, K=K, T=T)
    return float((c1 * K + c2) * T)


def localgd_cost(c1: Number, c2: Number, T: int) -> float:
    """Return LocalGD's communication cost (c1 + c2) T: it aggregates once per global round.

    The number of local steps does not matter.
    Thesis: Sec. 5.4.5.

    Args:
        c1: cost of a local round.
        c2: cost of a global round.
        T: number of global rounds.

    Returns:
        The cost.

    >>> round(1 - cost(1, 0, K=10, T=1) / localgd_cost(1, 0, T=39), 4)
    0.7436
    """
    return cost(c1, c2, K=1, T=T)


def _check_rounds(c1: Number, c2: Number, **rounds: int) -> None:
    nonnegative(c1=c1, c2=c2)
    for name, value in rounds.items():
        if value < 1:
            raise ValueError(f"{name}={value}; allowed: at least 1")
