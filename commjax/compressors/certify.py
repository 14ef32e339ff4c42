"""Measure whether a compressor satisfies the constants that it states.  `format.check` tests its bytes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from commjax.compressors.format import check
from commjax.core.base import Compressor, Constants, Key

# Largest number of outcomes to enumerate; beyond it, sampling is cheaper.
_LARGEST_LAW = 4096
# Draws of `compress` per trial vector that an enumeration compares with the outcomes.
_DRAWS_OF_LAW = 200
_TOLERANCE = 1e-9


class ViolatedConstantError(ValueError):
    """A measured constant of a compressor is larger than the stated one."""


class Certificate(NamedTuple):
    """The result of `certify`: stated and measured constants.

    Attributes:
        method: "enumeration", or the number of samples.
        stated: the constants that the compressor states.
        measured: the largest values over the trial vectors: exact under enumeration, else lower confidence bounds.
        estimate: the largest estimates over the trial vectors; equal to `measured` under enumeration.
    """

    method: str
    stated: Constants
    measured: Constants
    estimate: Constants


def trial_vectors(rng: np.random.Generator, d: int, n: int, count: int) -> np.ndarray:
    """Return trial vectors [count + 6, n, d] for `certify`.

    Six are fixed: flat and sparse vectors at which the bounds of known compressors are attained.  The others are
    random: one third is Gaussian, one third heavy-tailed, one third heavy-tailed and centred over the clients (if n >
    1).

    Args:
        rng: NumPy generator of the random vectors.
        d: dimension.
        n: number of clients.
        count: number of random vectors.

    Returns:
        Array [count + 6, n, d].
    """
    clouds = rng.standard_normal((count, n, d))
    clouds[count // 3 :] *= np.exp(2 * rng.standard_normal((count - count // 3, n, d)))
    centred = clouds - clouds.mean(axis=1, keepdims=True)
    clouds[2 * count // 3 :] = centred[2 * count // 3 :] if n > 1 else clouds[2 * count // 3 :]
    flat = np.ones((n, d))
    sign = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)[:, None]
    sign[-1] *= n % 2 == 0  # if n is odd, the last row is zero, so that the rows add up to zero
    spike = np.tile(np.eye(d)[0], (n, 1))
    half = np.tile((np.arange(d) < max(1, d // 2)).astype(float), (n, 1))
    peak = np.tile(np.where(np.arange(d) == 0, 1.0, 1 / (np.sqrt(d) + 1)), (n, 1))
    fixed = np.stack([flat, sign * flat if n > 1 else flat, spike, half, peak, np.full((n, d), 4 / 3)])
    return np.concatenate([fixed, clouds])


def _sizes(xs: np.ndarray) -> np.ndarray:
    return np.maximum((xs**2).sum(axis=1), np.finfo(float).tiny)  # C(0) = 0: the relative error 0 / tiny is 0


def _exact(compressor: Compressor, xs: np.ndarray) -> Constants:
    probability, values = compressor.outcomes(xs)  # type: ignore[misc]
    mean = np.einsum("m,mnd->nd", probability, values)
    deviation = values - mean
    sizes = _sizes(xs)
    bias = np.sqrt(((mean - xs) ** 2).sum(axis=1) / sizes)
    variance = np.einsum("m,mnd->n", probability, deviation**2) / sizes
    average = np.einsum("m,md->", probability, deviation.mean(axis=1) ** 2) / sizes.mean()
    return Constants(bias.max(), variance.max(), average)


def _follows_its_law(compressor: Compressor, xs: np.ndarray, draws: np.ndarray, precision: float) -> bool:
    """Return whether every draw of `compress` is one of the outcomes with positive probability."""
    probability, values = compressor.outcomes(xs)  # type: ignore[misc]
    distance = np.abs(draws[:, None] - values[probability > 0][None]).max(axis=(2, 3))
    return bool((distance.min(axis=1) <= precision * (np.abs(xs).max() + np.abs(values).max())).all())


def _sampler(compressor: Compressor, n: int) -> Callable[[Array, Array], Array]:
    """Return a jitted function (keys [samples], xs [n, d]) -> values [samples, n, d]."""

    def once(key: Key, xs: Array) -> Array:
        return jax.vmap(lambda x, id: compressor.compress(key, x, id, n).value)(xs, jnp.arange(n))

    return jax.jit(jax.vmap(once, in_axes=(0, None)))


def _bounds(values: np.ndarray, xs: np.ndarray, z: float) -> tuple[Constants, Constants]:
    """Return (lower confidence bounds, estimates); a bound lies z standard errors below its estimate."""
    samples = len(values)
    mean, sizes = values.mean(axis=0), _sizes(xs)
    squares = ((values - mean) ** 2).sum(axis=2) / sizes  # [samples, n]
    averages = ((values - mean).mean(axis=1) ** 2).sum(axis=1) / sizes.mean()
    unbiased = samples / (samples - 1)
    omega, omega_ran = squares.mean(axis=0) * unbiased, averages.mean() * unbiased
    error = z / np.sqrt(samples)
    bias = np.sqrt(((mean - xs) ** 2).sum(axis=1) / sizes)
    noise = np.sqrt(omega / samples)
    slack = (1 + z) ** 2 / samples  # because the mean and the spread of the squares are estimated, too
    lower = Constants(
        max(0.0, (bias - (1 + z) * noise).max()),
        max(0.0, (omega * (1 - slack) - error * squares.std(axis=0)).max()),
        max(0.0, omega_ran * (1 - slack) - error * averages.std()),
    )
    corrected = np.sqrt(np.maximum(bias**2 - noise**2, 0))
    return lower, Constants(corrected.max(), omega.max(), omega_ran)


def certify(
    compressor: Compressor,
    d: int,
    n: int = 1,
    *,
    key: Key | None = None,
    trials: int = 12,
    samples: int = 4000,
    z: float = 5.0,
    enumerate_up_to: int = 6,
) -> Certificate:
    """Measure eta, omega and omega_ran of n clients on R^d, and raise an error if a stated constant is violated.

    If d and n are small, every outcome is enumerated: the expectations are exact, and each draw of `compress` must be
    one of the outcomes.  Otherwise the expectations are sampled.  A constant is violated if it is below the measured
    value, up to rounding.  A measured value is a lower bound of the true constant, because the supremum is over the
    trial vectors only.  At the end, `check` compares `compress` with `encode` and `decode` on vectors of R^d in JAX's
    default precision.

    Args:
        compressor: the compressor to test.
        d: dimension.
        n: number of clients.
        key: random key; `jax.random.key(0)` if None.
        trials: number of random trial vectors; see `trial_vectors`.
        samples: number of draws for each trial vector when sampling.
        z: number of standard errors between an estimate and its lower confidence bound.
        enumerate_up_to: largest d for which outcomes are enumerated (and n must be at most 3).

    Returns:
        The stated, measured and estimated constants.

    Raises:
        ViolatedConstantError: if a constant is violated, if a draw is not one of the outcomes, or if it is not finite.
        WireFormatError: if `check` fails.

    >>> from commjax.compressors import rand_k
    >>> certify(rand_k(2), d=4, n=2).measured
    Constants(eta=0.0, omega=1.0, omega_ran=0.5)
    """
    stated = compressor.constants(d, n)
    tolerance = _TOLERANCE
    key = jax.random.key(0) if key is None else key
    sample, rounding = _sampler(compressor, n), 32 * float(jnp.finfo(jnp.zeros(()).dtype).eps)
    trial = trial_vectors(np.random.default_rng(0), d, n, trials)
    exact = compressor.outcomes is not None and d <= enumerate_up_to and n <= 3
    if exact:
        exact = len(compressor.outcomes(trial[0])[0]) <= _LARGEST_LAW  # type: ignore[misc]
    if exact:
        rows = [_exact(compressor, xs) for xs in trial]
        pairs = [(row, row) for row in rows]
        keys = jax.random.split(key, _DRAWS_OF_LAW)
        for xs in np.asarray(jnp.asarray(trial), np.float64):
            if not _follows_its_law(compressor, xs, np.asarray(sample(keys, jnp.asarray(xs)), np.float64), rounding):
                raise ViolatedConstantError(
                    f"{compressor.name} on R^{d} with {n} clients: "
                    "`compress` drew a value that is none of its `outcomes`"
                )
    else:
        trial = np.asarray(jnp.asarray(trial), np.float64)  # rounded to JAX's default precision
        tolerance = max(tolerance, rounding)
        keys = [jax.random.split(k, samples) for k in jax.random.split(key, len(trial))]
        pairs = []
        for k, xs in zip(keys, trial):
            values = np.asarray(sample(k, jnp.asarray(xs)), np.float64)
            if not np.all(np.isfinite(values)):  # comparisons with NaN are False, so they would not raise
                raise ViolatedConstantError(
                    f"{compressor.name} on R^{d} with {n} clients: `compress` drew a value that is not finite"
                )
            pairs.append(_bounds(values, xs, z))
    measured, estimate = (
        Constants(*(float(np.round(max(column), 12)) for column in zip(*side))) for side in zip(*pairs)
    )
    for name, have, said in zip(Constants._fields, measured, stated):
        if have > said + tolerance * (1 + said):
            raise ViolatedConstantError(
                f"{compressor.name} on R^{d} with {n} clients states {name} = {said:.6g}, measured at least {have:.6g}"
            )
    check(compressor, jnp.zeros(d), n, key=key, keys=1)
    return Certificate("enumeration" if exact else f"{samples} samples", stated, measured, estimate)
