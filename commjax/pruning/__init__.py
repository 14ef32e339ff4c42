"""Post-training pruning of linear layers W [in, out], without training.

    stats = statistics.add(stats, statistics.of(x, y))          over calibration samples
    S = scores.ria(alpha=0.5)(W, stats)                         the weights of least score are pruned
    mask = masks.unstructured(S, 0.5, group="output")           or masks.n_m(S, 2, 4)
    W, mask = regrow.dsnot(W, mask, stats)                      or regrow.r2_dsnot

`reconstruct` measures the error of the pruned layer's outputs.
"""

from commjax.pruning import masks, reconstruct, regrow, scores, statistics

__all__ = ["masks", "reconstruct", "regrow", "scores", "statistics"]
