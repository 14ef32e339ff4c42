"""Who trains what: the layers L_i of each client, and how much of the other layers it is sent.

Thesis: L1662 (line 2 of FedP3), L1822 (OPU2, OPU3, LowerB), L1902 (OPU1-2-3, OPU2-3), L1832 (ResNet-18).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from commjax.algorithms.fedp3.layers import Layers, check_names, chosen


class Plan(NamedTuple):
    """What the server specifies before the first round.  Make it with the functions beneath, which look at what they are given."""

    layers: Layers
    trained: Bool[np.ndarray, "n l"]  # L_i
    keep: Float[np.ndarray, "n"]  # keep ratio of P_i, for the layers outside L_i


def plan(layers: Layers, trained: Sequence[Iterable[str]], keep: ArrayLike = 1.0) -> Plan:
    """L_i by name, one list of layers a client, the final one always among them; `keep` is one ratio in (0, 1], or one a client.

    Differs: F7 (the thesis's "pruning ratio" is the part that is kept).

    >>> layers = Layers(("conv", "head"), (0, 1))
    >>> plan(layers, [["head"], ["conv", "head"]]).trained.tolist()
    [[False, True], [True, True]]
    """
    if len(trained) == 0:
        raise ValueError("trained is empty; allowed: a list of layers for each of at least one client")
    return checked(layers, np.stack([chosen(layers, names) for names in trained]), keep)


def checked(layers: Layers, trained: Bool[np.ndarray, "n l"], keep: ArrayLike = 1.0) -> Plan:
    """A plan from a mask [client, layer]; ValueError for a client without the final layer or a ratio outside (0, 1]."""
    if len(trained) == 0:
        raise ValueError("trained has no clients (n = 0); allowed: at least one")
    if trained.ndim != 2 or trained.shape[1] != len(layers.names):
        raise ValueError(f"trained has shape {trained.shape}; allowed: [clients, {len(layers.names)} layers]")
    idle = np.flatnonzero(~trained.any(axis=1))
    if len(idle):
        raise ValueError(f"trained: client {idle[0]} has no layers; allowed: at least one of {', '.join(layers.names)}")
    headless = np.flatnonzero(~trained[:, -1])
    if len(headless):
        raise ValueError(
            f"trained: client {headless[0]} does not train the final layer {layers.names[-1]!r}; allowed: plans in which all do"
        )
    ratios = np.asarray(keep, np.float64)
    if ratios.shape not in ((), (len(trained),)) or not np.all((ratios > 0) & (ratios <= 1)):
        raise ValueError(f"keep={keep}; allowed: 0 < keep <= 1, one number or one for each of {len(trained)} clients")
    return Plan(layers, trained, np.broadcast_to(ratios, (len(trained),)).copy())


def _clients(n: int) -> int:
    if n < 1:
        raise ValueError(f"n={n}; allowed: at least 1 client")
    return n


def everything(layers: Layers, n: int) -> Plan:
    """All clients train all layers: FedAvg."""
    return checked(layers, np.ones((_clients(n), len(layers.names)), bool))


def opu(layers: Layers, n: int, *counts: int, seed: int = 0, keep: ArrayLike = 1.0) -> Plan:
    """Each client trains the final layer and so many others, drawn uniformly; with several `counts` the number is drawn too.

    opu(layers, n, 3) is OPU3, opu(layers, n, 1, 2, 3) OPU1-2-3, opu(layers, n, 1) LowerB.

    Thesis: L1822, L1902.  Differs: F5 (the final layer is not one of the `counts`, so OPU3 of a network of 5 trains 4 layers).

    >>> opu(Layers(("a", "b", "head"), (0, 1, 2)), 2, 1).trained.sum(axis=1).tolist()
    [2, 2]
    """
    hidden = len(layers.names) - 1
    if not counts or not all(1 <= count <= hidden for count in counts):
        raise ValueError(f"counts={counts}; allowed: numbers from 1 to the {hidden} layers beside the final one")
    rng = np.random.default_rng(seed)
    trained = np.zeros((_clients(n), hidden + 1), bool)
    trained[:, -1] = True
    for row in trained:
        row[rng.choice(hidden, size=rng.choice(counts), replace=False)] = True
    return checked(layers, trained, keep)


def lower_b(layers: Layers, n: int, *, seed: int = 0, keep: ArrayLike = 1.0) -> Plan:
    """LowerB: one layer and the final one."""
    return opu(layers, n, 1, seed=seed, keep=keep)


def consecutive(layers: Layers, n: int, count: int, *, keep: ArrayLike = 1.0) -> Plan:
    """As in the released code: client i trains `count` layers from i // (n / hidden) on, cyclically, and the final one.

    Differs: F23.

    >>> consecutive(Layers(("a", "b", "head"), (0, 1, 2)), 4, 1).trained[:, 0].tolist()
    [True, True, False, False]
    """
    hidden = len(layers.names) - 1
    if not 1 <= count <= hidden:
        raise ValueError(f"count={count}; allowed: 1 to the {hidden} layers beside the final one")
    trained = np.zeros((_clients(n), hidden + 1), bool)
    trained[:, -1] = True
    for i in range(n):
        trained[i, [(i * hidden // n + step) % hidden for step in range(count)]] = True
    return checked(layers, trained, keep)


def without(layers: Layers, n: int, sets: Sequence[Iterable[str]], *, seed: int = 0, keep: ArrayLike = 1.0) -> Plan:
    """Each client trains all layers except one of `sets`, drawn uniformly.

    Thesis: L1832 (-B2-B3 (full): all of B2 or all of B3; -B2 (part): the first or the last two layers of B2).
    """
    if len(sets) == 0:
        raise ValueError("sets is empty; allowed: at least one list of layers to leave out")
    masks = np.stack([chosen(layers, names) for names in sets])
    return checked(layers, ~masks[np.random.default_rng(seed).integers(len(masks), size=_clients(n))], keep)


def beneath(several: Sequence[Plan]) -> Plan:
    """Plans of the same layers one beneath the other: client i of plan number k has row k n + i, which `fedp3`'s `init` is told.

    >>> layers = Layers(("conv", "head"), (0, 1))
    >>> beneath([everything(layers, 2), plan(layers, [["head"], ["head"]], 0.5)]).keep.tolist()
    [1.0, 1.0, 0.5, 0.5]
    """
    if len(several) == 0 or any(one.layers != several[0].layers for one in several):
        raise ValueError(f"several: {len(several)} plans; allowed: at least one, and all of the same layers")
    trained = np.concatenate([one.trained for one in several])
    return checked(several[0].layers, trained, np.concatenate([one.keep for one in several]))


def check_rows(plan: Plan, clients: int, rows: ArrayLike | None) -> None:
    """ValueError unless a plan says what each of so many clients trains: it has a row for each, or `rows` names rows that it has."""
    n = len(plan.keep)
    if rows is None:
        if clients != n:
            raise ValueError(f"ids: {clients} clients, but the plan is for {n}")
        return
    given = np.asarray(rows)
    if given.shape != (clients,) or not np.all((given >= 0) & (given < n)):
        raise ValueError(f"rows={given}; allowed: for each of {clients} clients a row of the plan, 0 to {n - 1}")


def kept(size: int, ratio: float) -> int:
    """How many of `size` weights a keep ratio leaves: floor(ratio * size), at least 1.

    >>> kept(10, 0.7), kept(3, 0.1)
    (7, 1)
    """
    return max(1, int(ratio * size + 1e-9))


def relative_spread(values: Sequence[float | int] | np.ndarray) -> float:
    """(max - min) / min in percent: what the thesis calls ratios.

    Thesis: L4037.  Differs: F1.

    >>> relative_spread([15104, 1648640])
    10815.254237288136
    """
    return float(100 * (np.max(values) - np.min(values)) / np.min(values))


def uplink_sizes(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """How many params each client sends, `sizes` of the layers given.

    Thesis: L4037 (communication cost).
    """
    return plan.trained @ sizes


def deployed_sizes(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """How many params each client deploys: its own layers and the kept part of the others, not rounded.

    Thesis: L4037.  Differs: F3 (58 % larger is not 58 % smaller).
    """
    return uplink_sizes(plan, sizes) + plan.keep * (~plan.trained @ sizes)


def holding(plan: Plan, name: str) -> np.ndarray:
    """The ids of the clients that train a layer."""
    check_names(plan.layers.names, [name], "name")
    return np.flatnonzero(plan.trained[:, plan.layers.names.index(name)])
