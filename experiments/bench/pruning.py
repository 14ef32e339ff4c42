"""Scores, masks and DSnoT on one matrix, against torch on the CPU. Both sides run in one call.

    python -m experiments.bench.pruning            4096 x 4096 (or --inputs 1024 --outputs 1024), needs torch

    ours                                        torch
    Wanda's score, half of every output pruned  topk and a scatter, as users of Wanda write it
    Wanda's score, 2:4 mask                     the same (this ratio has the goal), and topk in groups of four
    DSnoT, from (W, mask, statistics) to mask   the loop of the released code: two sorts, four pointers, 50 cycles

The sides take turns, the median of `repeats` counts, and compilation is not counted. The number of entries in which the
masks differ is printed too.
"""

import statistics as numbers
import time
from dataclasses import dataclass

import jax
import numpy as np
import torch
import tyro

from commjax.pruning import masks, regrow, scores, statistics


@dataclass(frozen=True)
class Settings:
    inputs: int = 4096
    outputs: int = 4096
    sparsity: float = 0.5  # sparsity of the masks
    regrow_sparsity: float = 0.6  # sparsity of DSnoT, as in the thesis
    samples: int = 8  # calibration samples
    tokens: int = 256  # tokens per sample
    repeats: int = 7


def turns(ours, theirs, repeats: int) -> tuple[float, float]:
    """Return the median seconds of both functions, which take turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    jax.block_until_ready(ours())
    theirs()
    for _ in range(repeats):
        for side, run in zip(seconds, (ours, theirs)):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            side.append(time.perf_counter() - begin)
    return numbers.median(seconds[0]), numbers.median(seconds[1])


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


def line(name: str, ours: float, theirs: float, goal: str) -> None:
    """Print one row of the table."""
    print(f"  {name:<34}{ours * 1e3:10.1f} ms {theirs * 1e3:10.1f} ms {ours / theirs:8.3f}    {goal}")


def main(settings: Settings) -> None:
    """Time all sides and print the table."""
    shape = (settings.inputs, settings.outputs)
    W = jax.random.normal(jax.random.key(0), shape) * 0.02
    shift = 0.3 * jax.random.normal(jax.random.key(1), (settings.inputs,))
    x = jax.random.normal(jax.random.key(2), (settings.samples, settings.tokens, settings.inputs)) + shift
    stats = statistics.of(x)
    wanda = scores.wanda()
    theirs = torch.from_numpy(np.array(W.T))  # torch keeps [out, in]
    vectors = (statistics.input_sum, statistics.variance, statistics.input_norm)
    sums, variance, norms = (torch.from_numpy(np.array(f(stats))) for f in vectors)

    print(
        f"{shape[0]} x {shape[1]} float32, jax {jax.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"  {'':<34}{'ours':>13} {'torch':>13} {'ratio':>8}    goal")
    k = masks.count(settings.inputs, settings.sparsity)
    half = jax.jit(lambda W, stats: masks.unstructured(wanda(W, stats), settings.sparsity))
    pair = jax.jit(lambda W, stats: masks.n_m(wanda(W, stats), 2, 4))
    per_output = turns(lambda: half(W, stats), lambda: torch_mask(theirs, norms, k), settings.repeats)
    line(f"score + mask, output, {settings.sparsity:.0%}", *per_output, "at most 1, goal 0.5")
    checked = turns(
        lambda: masks.unstructured(wanda(W, stats), settings.sparsity),
        lambda: torch_mask(theirs, norms, k),
        settings.repeats,
    )
    line("  the same in two calls, checked", *checked, "")
    n_m, torch_n_m = turns(lambda: pair(W, stats), lambda: torch_2_4(theirs, norms), settings.repeats)
    line("score + 2:4 mask / the first line", n_m, per_output[1], "at most 0.1")
    line("  against topk in groups of four", n_m, torch_n_m, "")

    mask = masks.unstructured(wanda(W, stats), settings.regrow_sparsity)
    pruned = torch.from_numpy(~np.array(mask.T))
    differ = []
    for same_sign in (False, True):
        seconds = turns(
            lambda same_sign=same_sign: regrow.dsnot(W, mask, stats, same_sign=same_sign)[1],
            lambda same_sign=same_sign: torch_dsnot(theirs, pruned, sums, variance, norms, same_sign=same_sign),
            settings.repeats,
        )
        line(f"DSnoT, sign rule {'on' if same_sign else 'off'}", *seconds, "at most 0.33")
        new = np.array(regrow.dsnot(W, mask, stats, same_sign=same_sign)[1].T)
        differ.append(
            int((new == torch_dsnot(theirs, pruned, sums, variance, norms, same_sign=same_sign).numpy()).sum())
        )
    first = int((np.array(half(W, stats).T) == torch_mask(theirs, norms, k).numpy()).sum())
    print(f"  entries of the masks that differ: score {first}, DSnoT {differ[0]} and {differ[1]} of {W.size}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
