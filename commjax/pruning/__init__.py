"""Post-training pruning of linear layers W [in, out], without training.

    stats = statistics.add(stats, statistics.of(x, y))          over calibration samples
    S = scores.ria(alpha=0.5)(W, stats)                         the smallest are pruned
    mask = masks.unstructured(S, 0.5, group="output")           or masks.n_m(S, 2, 4)
    W, mask = regrow.dsnot(W, mask, stats)                      or regrow.r2_dsnot

and `reconstruct` says what was lost.
"""

from commjax.pruning import masks, reconstruct, regrow, scores, statistics

__all__ = ["masks", "reconstruct", "regrow", "scores", "statistics"]
