"""Checks of the arguments of the formulas."""

Number = float | int


def positive(**values: Number) -> None:
    """Raise a ValueError for a number that is not positive.

    Args:
        **values: the numbers by name.
    """
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}; allowed: positive")


def nonnegative(**values: Number) -> None:
    """Raise a ValueError for a negative number.

    Args:
        **values: the numbers by name.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}; allowed: at least 0")
