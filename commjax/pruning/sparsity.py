"""The sparsity of every layer or block: the same for all, or OWL's, which prunes layers with more outliers less."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from commjax.pruning.masks import Scores, count


def uniform(layers: int, sparsity: float) -> np.ndarray:
    """Return the same sparsity for every layer.

    >>> uniform(3, 0.5).tolist()
    [0.5, 0.5, 0.5]

    Args:
        layers: Number of layers.
        sparsity: Share of weights to prune, 0 <= sparsity < 1.

    Returns:
        The sparsities [layers].
    """
    count(1, sparsity)
    return np.full(layers, sparsity)


def outlier_ratio(scores: Scores | Sequence[Array], multiple: float = 5.0) -> float:
    """Return the share of scores that exceed `multiple` times the mean score.

    Args:
        scores: Scores of one matrix, or of all matrices of a block; these are pooled.
        multiple: Scores above this multiple of the mean count as outliers.

    Returns:
        The share of outliers, from 0 to 1.
    """
    matrices = [scores] if isinstance(scores, jax.Array) else list(scores)
    sizes = np.array([S.size for S in matrices])
    # A Python number keeps S's dtype in the comparison below.
    mean = float(sum(float(jnp.mean(S)) * S.size for S in matrices) / sizes.sum())
    return float(sum(int(jnp.sum(multiple * mean < S)) for S in matrices) / sizes.sum())


def outlier_weighted(
    ratios: Sequence[float] | np.ndarray, sparsity: float, spread: float = 0.08, sizes: Sequence[int] | None = None
) -> np.ndarray:
    """OWL: layers with more outliers are pruned less.

        keep_l = 2 spread (D_l - min D) / (max D - min D) + c,      c such that the mean of 1 - keep_l is `sparsity`

    D_l is the outlier ratio of layer l.  The formula and the defaults 0.08 and 5 (times the mean) are those of OWL's
    Llama script, which pools the scores of all matrices of a block and uses the activations of the dense model.
    Differs: equal ratios give uniform sparsities, where the released code divides by 0; sparsities outside [0, 1) raise
    a ValueError.

    >>> outlier_weighted([0.01, 0.02, 0.03], 0.5).round(2).tolist()
    [0.58, 0.5, 0.42]

    Args:
        ratios: D_l of each layer, computed by `outlier_ratio` from Wanda's scores.
        sparsity: Mean sparsity of the layers.
        spread: Sparsities differ by at most 2 `spread`.
        sizes: Number of weights of each layer, the weights of the mean.  By default layers count equally, as in the
            released code.

    Returns:
        The sparsity of each layer.
    """
    count(1, sparsity)
    D = np.asarray(ratios, dtype=float)
    if D.ndim != 1 or not D.size or not np.all(np.isfinite(D)):
        raise ValueError(f"ratios={ratios}; allowed: a finite number for every layer")
    if not spread >= 0:
        raise ValueError(f"spread={spread}; allowed: at least 0")
    width = D.max() - D.min()
    keep = 2 * spread * (D - D.min()) / width if width > 0 else np.zeros_like(D)
    result = sparsity - (keep - np.average(keep, weights=sizes))
    if result.min() < 0 or result.max() >= 1:
        raise ValueError(
            f"spread={spread} with sparsity={sparsity} gives sparsities from {result.min():.3g} to {result.max():.3g}; "
            "allowed: 0 <= sparsity < 1"
        )
    return result
