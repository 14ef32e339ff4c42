"""Every compressor of the package, small, and exact expectations."""

import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import (
    comp,
    dithering,
    identity,
    leafwise,
    m_nice,
    mix,
    natural,
    perm_k,
    rand_k,
    rounded,
    scaled,
    scaled_sign,
    ternary,
    top_k,
)
from commjax.core.base import Compressor

INF = float("inf")

# Those that know their own law.
WITH_LAW = {
    c.name: c
    for c in [
        identity(),
        top_k(2),
        rand_k(2),
        comp(1, 3),
        mix(1, 2),
        natural(),
        dithering(2, 1.0),
        dithering(3, 2.0),
        dithering(2, INF),
        ternary(),
        scaled_sign(),
        perm_k(),
        m_nice(2),
        m_nice(2, rand_k(2)),
        scaled(0.3, rand_k(2)),
    ]
}
ZOO = WITH_LAW | {
    c.name: c
    for c in [
        comp(2, 3),
        scaled(0.3, scaled(0.7, dithering(3))),
        m_nice(2, dithering(7)),
        leafwise(lambda d: rand_k(max(1, d // 2))),
        leafwise(top_k(1)),
        leafwise(m_nice(2)),
        rounded(rand_k(2), jnp.float32),
        rounded(m_nice(2, natural()), jnp.bfloat16),
    ]
}


def moments(compressor: Compressor, xs: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """|E C_i - x_i|^2 and E |C_i - E C_i|^2 of each client, E |mean_i (C_i - E C_i)|^2; written without `certify`."""
    probability, values = compressor.outcomes(xs)
    assert np.all(probability >= 0) and probability.sum() == pytest.approx(1, abs=1e-12)
    mean = sum(p * v for p, v in zip(probability, values))
    variance = sum(p * np.sum((v - mean) ** 2, axis=1) for p, v in zip(probability, values))
    average = sum(p * np.sum((v - mean).mean(axis=0) ** 2) for p, v in zip(probability, values))
    return np.sum((mean - xs) ** 2, axis=1), variance, average


def sizes(xs: np.ndarray) -> np.ndarray:
    return np.sum(xs**2, axis=1)


def cloud(seed: int, n: int, d: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) * np.exp(rng.standard_normal((n, d)))


def centred(seed: int, n: int, d: int) -> np.ndarray:
    xs = cloud(seed, n, d)
    return xs - xs.mean(axis=0)
