"""Plans: the layers L_i that each client trains, and how much of the other layers it receives.

Thesis: Alg. 5 (line 2), Sec. 4.4.2 (OPU2, OPU3, LowerB, ResNet-18), Table 4.2 (OPU1-2-3, OPU2-3).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool

from commjax.algorithms.fedp3.layers import Layers, Plan, check_names, chosen

__all__ = [
    "Plan",
    "checked",
    "consecutive",
    "deployed_sizes",
    "everything",
    "holding",
    "kinds",
    "lower_b",
    "opu",
    "plan",
    "relative_spread",
    "uplink_sizes",
    "without",
]


def plan(layers: Layers, trained: Sequence[Iterable[str]], keep: ArrayLike = 1.0) -> Plan:
    """A plan from the names of the layers that each client trains.

    Args:
        layers: the layers of the network.
        trained: L_i, one list of names per client.  Each list must contain the final layer.
        keep: keep ratio in (0, 1], one number or one per client.

    Returns:
        The plan.

    Differs: F7 (the thesis's "pruning ratio" is the part that is kept).

    >>> layers = Layers(("conv", "head"), (0, 1))
    >>> plan(layers, [["head"], ["conv", "head"]]).trained.tolist()
    [[False, True], [True, True]]
    """
    if len(trained) == 0:
        raise ValueError("trained is empty; allowed: a list of layers for each of at least one client")
    return checked(layers, np.stack([chosen(layers, names) for names in trained]), keep)


def checked(layers: Layers, trained: Bool[np.ndarray, "n l"], keep: ArrayLike = 1.0) -> Plan:
    """A plan from a mask; a ValueError for a client without the final layer or a ratio outside (0, 1].

    Args:
        layers: the layers of the network.
        trained: whether client i trains layer l.
        keep: keep ratio in (0, 1], one number or one per client.

    Returns:
        The plan.
    """
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
            f"trained: client {headless[0]} does not train the final layer {layers.names[-1]!r}; "
            "allowed: plans in which all do"
        )
    ratios = np.asarray(keep, np.float64)
    if ratios.shape not in ((), (len(trained),)) or not np.all((ratios > 0) & (ratios <= 1)):
        raise ValueError(f"keep={keep}; allowed: 0 < keep <= 1, one number or one for each of {len(trained)} clients")
    return Plan(layers, trained, np.broadcast_to(ratios, (len(trained),)).copy())


def _clients(n: int) -> int:
    if n < 1:
        raise ValueError(f"n={n}; allowed: at least 1 client")
    return n


def _final_layer_only(n: int, layers: int) -> Bool[np.ndarray, "n l"]:
    trained = np.zeros((_clients(n), layers), bool)
    trained[:, -1] = True
    return trained


def everything(layers: Layers, n: int) -> Plan:
    """The plan in which all n clients train all layers: FedAvg."""
    return checked(layers, np.ones((_clients(n), len(layers.names)), bool))


def opu(layers: Layers, n: int, *counts: int, seed: int = 0, keep: ArrayLike = 1.0) -> Plan:
    """Each client trains the final layer and some others, which are drawn uniformly.

    opu(layers, n, 3) is OPU3, opu(layers, n, 1, 2, 3) OPU1-2-3, opu(layers, n, 1) LowerB.

    Args:
        layers: the layers of the network.
        n: number of clients.
        *counts: number of layers to draw, besides the final one.  With several numbers one of them is drawn per client.
        seed: seed of the draw.
        keep: keep ratio in (0, 1], one number or one per client.

    Returns:
        The plan.

    Thesis: Sec. 4.4.2, Table 4.2.
    Differs: F5 (the final layer is not one of the `counts`, so OPU3 of a network of 5 trains 4 layers).

    >>> opu(Layers(("a", "b", "head"), (0, 1, 2)), 2, 1).trained.sum(axis=1).tolist()
    [2, 2]
    """
    hidden = len(layers.names) - 1
    if not counts or not all(1 <= count <= hidden for count in counts):
        raise ValueError(f"counts={counts}; allowed: numbers from 1 to the {hidden} layers beside the final one")
    rng, trained = np.random.default_rng(seed), _final_layer_only(n, hidden + 1)
    for row in trained:
        row[rng.choice(hidden, size=rng.choice(counts), replace=False)] = True
    return checked(layers, trained, keep)


def lower_b(layers: Layers, n: int, *, seed: int = 0, keep: ArrayLike = 1.0) -> Plan:
    """LowerB: each client trains the final layer and one other, which is drawn uniformly.

    Args:
        layers: the layers of the network.
        n: number of clients.
        seed: seed of the draw.
        keep: keep ratio in (0, 1], one number or one per client.

    Returns:
        The plan.
    """
    return opu(layers, n, 1, seed=seed, keep=keep)


def consecutive(layers: Layers, n: int, count: int, *, keep: ArrayLike = 1.0) -> Plan:
    """Each client trains the final layer and `count` consecutive others, as in the released code.

    Client i trains the layers from i // (n / hidden) on, cyclically, where `hidden` is the number of layers besides the
    final one.

    Args:
        layers: the layers of the network.
        n: number of clients.
        count: number of layers, besides the final one.
        keep: keep ratio in (0, 1], one number or one per client.

    Returns:
        The plan.

    Differs: F23.

    >>> consecutive(Layers(("a", "b", "head"), (0, 1, 2)), 4, 1).trained[:, 0].tolist()
    [True, True, False, False]
    """
    hidden = len(layers.names) - 1
    if not 1 <= count <= hidden:
        raise ValueError(f"count={count}; allowed: 1 to the {hidden} layers beside the final one")
    trained = _final_layer_only(n, hidden + 1)
    for i in range(n):
        trained[i, [(i * hidden // n + step) % hidden for step in range(count)]] = True
    return checked(layers, trained, keep)


def without(layers: Layers, n: int, sets: Sequence[Iterable[str]], *, seed: int = 0, keep: ArrayLike = 1.0) -> Plan:
    """Each client trains all layers except one of several sets, which is drawn uniformly.

    Args:
        layers: the layers of the network.
        n: number of clients.
        sets: lists of names of layers.
        seed: seed of the draw.
        keep: keep ratio in (0, 1], one number or one per client.

    Returns:
        The plan.

    Thesis: Sec. 4.4.2 (-B2-B3 (full): all of B2 or all of B3; -B2 (part): the first or the last two layers of B2).
    """
    if len(sets) == 0:
        raise ValueError("sets is empty; allowed: at least one list of layers to leave out")
    masks = np.stack([chosen(layers, names) for names in sets])
    return checked(layers, ~masks[np.random.default_rng(seed).integers(len(masks), size=_clients(n))], keep)


def kinds(several: Sequence[Plan]) -> Plan:
    """The different kinds of clients in several plans of the same layers, one client of each.

    A method with this plan is compiled once and serves all of these plans: the `init` of `fedp3` takes one of them.

    Args:
        several: the plans.

    Returns:
        A plan with one client for every pair of layers L_i and keep ratio.

    >>> layers = Layers(("conv", "head"), (0, 1))
    >>> kinds([everything(layers, 2), plan(layers, [["head"], ["head"]], 0.5)]).keep.tolist()
    [0.5, 1.0]
    """
    if len(several) == 0 or any(other.layers != several[0].layers for other in several):
        raise ValueError(f"several: {len(several)} plans; allowed: at least one, and all of the same layers")
    rows = np.concatenate([np.column_stack([other.trained, other.keep]) for other in several])
    rows = np.unique(rows, axis=0)
    return checked(several[0].layers, rows[:, :-1].astype(bool), rows[:, -1])


def relative_spread(values: Sequence[float | int] | np.ndarray) -> float:
    """(max - min) / min in percent, which the thesis calls ratios.

    Thesis: Sec. C.2.5.  Differs: F1.

    >>> relative_spread([15104, 1648640])
    10815.254237288136
    """
    return float(100 * (np.max(values) - np.min(values)) / np.min(values))


def uplink_sizes(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """Number of params that each client sends.

    Args:
        plan: the plan.
        sizes: number of params of each layer.

    Returns:
        One number per client.

    Thesis: Sec. C.2.5 (communication cost).
    """
    return plan.trained @ sizes


def deployed_sizes(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """Number of params that each client deploys: its own layers and the kept part of the others, not rounded.

    Args:
        plan: the plan.
        sizes: number of params of each layer.

    Returns:
        One number per client.

    Thesis: Sec. C.2.5.  Differs: F3 (58 % larger is not 58 % smaller).
    """
    return uplink_sizes(plan, sizes) + plan.keep * (~plan.trained @ sizes)


def holding(plan: Plan, name: str) -> np.ndarray:
    """The ids of the clients that train the layer `name`."""
    check_names(plan.layers.names, [name], "name")
    return np.flatnonzero(plan.trained[:, plan.layers.names.index(name)])
