"""Layers, first masks and DSnoT one output after another: what the tests of regrowing share."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from commjax.pruning import masks, scores, statistics


def oracle(mask, M, G, P, *, m=None, cycles=50, threshold=0.1, same_sign=False):
    """DSnoT with contributions M, grow scores G and prune scores P, [in, out]."""
    mask = np.array(mask)
    for k in range(mask.shape[1]):
        can_grow, can_prune = ~mask[:, k], mask[:, k].copy()
        error = first = M[can_grow, k].sum()
        for _ in range(cycles):
            s = 1 if error > 0 else -1
            gain = np.where(can_grow, s * G[:, k], 0)
            g = int(np.flatnonzero(gain == gain.max())[-1 if s > 0 else 0])  # the released list is read from its ends
            if not abs(error) > threshold or not gain[g] > 0:
                break
            can_grow[g] = False
            allowed = can_prune & (s * M[:, k] < 0 if m is None else np.arange(len(M)) // m == g // m)
            if not allowed.any():
                if m is None:
                    break
                continue
            p = int(np.argmin(np.where(allowed, P[:, k], np.inf)))
            after = error + M[p, k] - M[g, k]
            if same_sign and np.sign(after) != np.sign(first):
                break
            can_prune[p], mask[g, k], mask[p, k], error = False, True, False, after
    return mask


def layer(inputs, outputs, seed=0, dtype: Any = np.float64, shift=0.3):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 8, inputs)) * rng.uniform(0.2, 2, inputs) + shift * rng.standard_normal(inputs)
    W = jnp.array(rng.standard_normal((inputs, outputs)).astype(dtype))
    return W, statistics.of(jnp.array(x.astype(dtype)))


def first_mask(W, stats, pattern, sparsity=0.6):
    S = scores.wanda()(W, stats)
    return masks.unstructured(S, sparsity) if pattern is None else masks.n_m(S, *pattern)


def check(W, mask, found, expected):
    pruned, new = found
    assert np.array_equal(new, expected)
    assert np.array_equal(pruned, np.where(expected, W, 0)) and pruned.dtype == W.dtype
    assert np.array_equal(new.sum(0), mask.sum(0))
