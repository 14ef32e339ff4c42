"""Post-training pruning of linear layers: statistics of activations, scores, masks, regrowing."""

from commjax.pruning import masks, regrow, scores, statistics

__all__ = ["masks", "regrow", "scores", "statistics"]
