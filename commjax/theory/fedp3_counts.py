"""The parameters that clients of FedP3 hold and send, counted by layer.  Every client trains the last layer."""


def sent(layers: dict[str, int], trained: list[str]) -> int:
    """Return the number of parameters that a client sends: the layers that it trains, and always the last layer.

    Args:
        layers: number of parameters of each layer by name, the last layer last.
        trained: names of the layers that the client trains.

    Returns:
        The number of parameters.

    >>> sent({"conv1": 4864, "fc1": 1638400, "ffc": 10240}, ["fc1"])
    1648640
    """
    names = list(layers)
    if unknown := [name for name in trained if name not in layers]:
        raise ValueError(f"trained={trained}; allowed: {', '.join(names)}, got {', '.join(unknown)}")
    return sum(layers[name] for name in {*trained, names[-1]})


def deployed(layers: dict[str, int], trained: list[str], keep: float) -> float:
    """Return the number of parameters that a client holds: those that it sends, and the share `keep` of all others.

    Thesis: Sec. C.2.5.
    Differs (docs/errata.md): F3 (corrected numbers), F7 (the thesis's "pruning ratio" is the share that is kept).

    Args:
        layers: number of parameters of each layer by name, the last layer last.
        trained: names of the layers that the client trains.
        keep: share of the parameters of the other layers that remain after pruning, 0 < keep <= 1.

    Returns:
        The number of parameters.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}; allowed: 0 < keep <= 1")
    whole = sent(layers, trained)
    return whole + keep * (sum(layers.values()) - whole)


def spread(values: list[float]) -> float:
    """Return (max - min) / min, which the thesis prints times 100.

    Thesis: Sec. C.2.5.  Differs (docs/errata.md): F1 (the printed numbers are per cent, not factors).

    Args:
        values: positive numbers.

    Returns:
        The relative spread.

    >>> round(100 * spread([15104.0, 1648640.0]), 2)
    10815.25
    """
    return (max(values) - min(values)) / min(values)


def selection_share(layers: dict[str, int], count: int) -> tuple[float, float]:
    """Return the shares that a client sends if it trains `count` layers, drawn uniformly, and the last layer.

    Thesis: Sec. 4.4.2.  Differs (docs/errata.md): F5 (the printed savings are shares of the number of layers).

    Args:
        layers: number of parameters of each layer by name, the last layer last.
        count: number of drawn layers.

    Returns:
        The share of the layers, and the expected share of the parameters.

    >>> selection_share({"a": 10, "b": 30, "last": 10}, 1)
    (0.6666666666666666, 0.6)
    """
    *hidden, last = layers.values()
    if not 1 <= count <= len(hidden):
        raise ValueError(f"count={count}; allowed: 1 to {len(hidden)}")
    total = sum(hidden) + last
    return (count + 1) / len(layers), (count / len(hidden) * sum(hidden) + last) / total


def combined_saving(keep: float, saved: float) -> float:
    """Return 1 - keep (1 - saved), the saving if layers are pruned and some of them are not sent.

    Thesis: Sec. 4.4.2; Differs (docs/errata.md): F6 (15.63 %, not 16.63 %).

    Args:
        keep: share of the parameters that remain after pruning.
        saved: share of the parameters that are not sent.

    Returns:
        The saved share.

    >>> combined_saving(0.9, 0.0625), combined_saving(0.9, 0.125)
    (0.15625, 0.21250000000000002)
    """
    return 1 - keep * (1 - saved)
