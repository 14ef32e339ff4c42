"""Scores, masks and DSnoT on one matrix, against torch on the CPU. Both sides run in one call.

    python -m experiments.bench.pruning            4096 x 4096 (or --inputs 1024 --outputs 1024), needs torch

    ours                                        torch
    Wanda's score, half of every output pruned  topk and a scatter, as users of Wanda write it
    Wanda's score, 2:4 mask                     the same (this ratio has the goal), and topk in groups of four
    DSnoT, from (W, mask, statistics) to mask   the loop of the released code: two sorts, four pointers, 50 cycles

The number of entries in which the masks differ is printed too.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import torch

from commjax.pruning import masks, regrow, scores, statistics
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    inputs: int = 4096
    outputs: int = 4096
    sparsity: float = 0.5  # sparsity of the masks
    regrow_sparsity: float = 0.6  # sparsity of DSnoT, as in the thesis
    samples: int = 8  # calibration samples
    tokens: int = 256  # tokens per sample
    repeats: int = 5


QUICK = Settings(inputs=1024, outputs=1024, repeats=3)


def torch_mask(W, norms, k):
    """Return a mask [out, in] that is True where a weight is pruned: the k least scores of every output."""
    metric = W.abs() * norms.reshape(1, -1)
    least = torch.topk(metric, k, dim=1, largest=False)[1]
    return torch.zeros_like(metric, dtype=torch.bool).scatter_(1, least, True)


def torch_2_4(W, norms):
    """Return a 2:4 mask [out, in] that is True where a weight is pruned."""
    groups = (W.abs() * norms.reshape(1, -1)).reshape(len(W), -1, 4)
    least = torch.topk(groups, 2, dim=2, largest=False)[1]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, least, True).reshape(W.shape)


def torch_dsnot(W, pruned, sums, variance, norms, *, same_sign, cycles=50, threshold=0.1):
    """Run the released loop of DSnoT, rewritten, on matrices [out, in].

    Args:
        W: Dense weights [out, in].
        pruned: The first mask [out, in], True where a weight is pruned.
        sums: Sum of each input over the tokens of a sample, as mean over samples [in].
        variance: Variance of each input [in].
        norms: Norm of each input [in].
        same_sign: Stop an output before its error changes sign.
        cycles: Most swaps of an output.
        threshold: Stop an output when its absolute error is at most this.

    Returns:
        The new mask [out, in], True where a weight is pruned.
    """
    outputs, inputs = W.shape
    contribution, pruned = W * sums.reshape(1, -1), pruned.clone()
    kept = inputs - int(pruned[0].sum())
    error = torch.where(pruned, contribution, 0).sum(dim=1, keepdim=True)
    first = torch.sign(error)
    grow_list = torch.sort(torch.where(pruned, contribution / variance.reshape(1, -1), 0), dim=1)[1]
    # The order is: kept weights with a negative contribution by ascending Wanda score, kept weights with a positive one
    # by descending score, pruned weights.
    order = torch.sign(contribution) / (W.abs() * norms.reshape(1, -1))
    prune_list = torch.sort(torch.where(pruned, torch.inf, order), dim=1)[1]
    grow_low = torch.zeros((outputs, 1), dtype=torch.int64)
    grow_high, prune_low, prune_high = grow_low + inputs - 1, grow_low.clone(), grow_low + kept - 1
    active = torch.ones((outputs, 1), dtype=torch.bool)
    for _ in range(cycles):
        if not active.any():
            break
        up, down = error > 0, error < 0
        g = grow_list.gather(1, torch.where(up, grow_high, grow_low))
        grow_high, grow_low = grow_high - up.long(), grow_low + (~up).long()
        p = prune_list.gather(1, torch.where(down, prune_high, prune_low))
        prune_high, prune_low = prune_high - down.long(), prune_low + (~down).long()
        after = error + contribution.gather(1, p) - contribution.gather(1, g)
        active &= error.abs() > threshold
        if same_sign:
            active &= torch.sign(after) == first
        pruned.scatter_(1, p, active | pruned.gather(1, p))
        pruned.scatter_(1, g, ~active & pruned.gather(1, g))
        error = torch.where(active, after, error)
    return pruned


def tables(settings: Settings) -> list[Table]:
    """Measure all sides."""
    shape = (settings.inputs, settings.outputs)
    W = jax.random.normal(jax.random.key(0), shape) * 0.02
    shift = 0.3 * jax.random.normal(jax.random.key(1), (settings.inputs,))
    x = jax.random.normal(jax.random.key(2), (settings.samples, settings.tokens, settings.inputs)) + shift
    stats, wanda = statistics.of(x), scores.wanda()
    theirs = torch.from_numpy(np.array(W.T))  # torch keeps [out, in]
    vectors = (statistics.input_sum, statistics.variance, statistics.input_norm)
    sums, variance, norms = (torch.from_numpy(np.array(f(stats))) for f in vectors)
    k = masks.count(settings.inputs, settings.sparsity)
    half = jax.jit(lambda W, stats: masks.unstructured(wanda(W, stats), settings.sparsity))
    pair = jax.jit(lambda W, stats: masks.n_m(wanda(W, stats), 2, 4))
    mask = masks.unstructured(wanda(W, stats), settings.regrow_sparsity)
    pruned = torch.from_numpy(~np.array(mask.T))

    def ours(same_sign: bool) -> jax.Array:
        return regrow.dsnot(W, mask, stats, same_sign=same_sign)[1]

    def loop(same_sign: bool) -> torch.Tensor:
        return torch_dsnot(theirs, pruned, sums, variance, norms, same_sign=same_sign)

    sides = {
        "mask of an output": Side(lambda: half(W, stats)),
        "the same, checked": Side(lambda: masks.unstructured(wanda(W, stats), settings.sparsity)),
        "2:4 mask": Side(lambda: pair(W, stats)),
        "torch, mask of an output": Side(lambda: torch_mask(theirs, norms, k)),
        "torch, 2:4 mask": Side(lambda: torch_2_4(theirs, norms)),
    }
    for same_sign, rule in ((False, "off"), (True, "on")):
        sides[f"DSnoT, sign rule {rule}"] = Side(partial(ours, same_sign))
        sides[f"torch, DSnoT, sign rule {rule}"] = Side(partial(loop, same_sign))
    ratios = {
        "mask of an output / torch": Ratio("mask of an output", "torch, mask of an output", 0.5),
        "2:4 mask / torch's mask of an output": Ratio("2:4 mask", "torch, mask of an output", 0.1),
        "2:4 mask / torch": Ratio("2:4 mask", "torch, 2:4 mask", 0.1),
        "DSnoT, sign rule off / torch": Ratio("DSnoT, sign rule off", "torch, DSnoT, sign rule off", 0.33),
        "DSnoT, sign rule on / torch": Ratio("DSnoT, sign rule on", "torch, DSnoT, sign rule on", 0.33),
    }
    differ = [int((np.array(half(W, stats).T) == torch_mask(theirs, norms, k).numpy()).sum())]
    differ += [int((np.array(ours(sign).T) == loop(sign).numpy()).sum()) for sign in (False, True)]
    print(f"entries of the masks that differ: score {differ[0]}, DSnoT {differ[1]} and {differ[2]} of {W.size}")
    return [
        Table(
            "Pruning a matrix",
            f"{shape[0]} x {shape[1]} float32, torch {torch.__version__.split('+')[0]}, "
            f"{torch.get_num_threads()} threads",
            "The torch side of DSnoT is a loop that we wrote from the description.",
            take_turns(sides, settings.repeats),
            ratios,
        )
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
