"""Post-training pruning of linear layers: statistics of activations, scores, masks, regrowing."""

from commjax.pruning import masks, scores, statistics

__all__ = ["masks", "scores", "statistics"]
