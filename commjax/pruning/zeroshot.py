"""Zero-shot accuracy: among several continuations of a text the model chooses the likeliest, scored as in lm-eval.

    score = scorer(*llm.load(folder), tokens.load(folder))
    accuracy(score, read(path, arc))        local files, without lm-eval
    lm_eval.template_lm(...)                the same model for lm-eval's own tasks

Thesis: Sec. 6.4.3, Table 6.6.  The tasks are worded as in lm-eval 0.4.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from commjax.data import bounded
from commjax.llm.base import Hidden, Layers, Model, Params
from commjax.llm.tokens import Tokenizer
from commjax.pruning.model import advance, embed

_POSITIONS = 512  # positions whose logits are held at once
_SHORTEST = 32  # batches are padded to this number of tokens times a power of two, so that few shapes are compiled

Pair = tuple[list[int], list[int]]  # tokens of a context, tokens of its continuation
Likelihood = tuple[float, bool]  # log p(continuation | context) in nats, whether greedy decoding gives it


class Question(NamedTuple):
    """A multiple-choice question.

    Attributes:
        contexts: Text before each continuation.
        continuations: The continuations to choose from.
        lengths: Length of each option in characters, for the normalised accuracy.
        answer: Number of the right continuation.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    lengths: tuple[int, ...]
    answer: int


class Accuracy(NamedTuple):
    """Shares of questions that were answered right.

    Attributes:
        acc: Share, when the likeliest continuation is chosen.
        acc_norm: Share, when the continuation of largest log-likelihood per character is chosen.
        count: Number of questions.
    """

    acc: float
    acc_norm: float
    count: int

    @property
    def deviation(self) -> float:
        """Return the standard error of `acc`.

        >>> Accuracy(0.5, 0.5, 101).deviation
        0.05
        """
        return math.sqrt(self.acc * (1 - self.acc) / max(1, self.count - 1))


# Local task files, one JSON object a line.


def choices(context: str, options: Sequence[str], answer: int) -> Question:
    """Make a question with one context, whose options follow a space.

    >>> choices("1 + 1 =", ["2", "eleven"], 0).continuations
    (' 2', ' eleven')

    Args:
        context: Text before the options.
        options: The options.
        answer: Number of the right option.

    Returns:
        The question.
    """
    if not 0 <= answer < len(options):
        raise ValueError(f"answer={answer}; allowed: 0 to {len(options) - 1}, an option")
    following = tuple(f" {option}" for option in options)
    return Question((context,) * len(options), following, tuple(map(len, options)), answer)


def arc(line: dict[str, Any]) -> Question:
    """Make a question from a line of ARC, easy or challenge.

    Args:
        line: One object of the .jsonl file.

    Returns:
        The question.
    """
    return choices(f"Question: {line['question']}\nAnswer:", line["choices"], line["label"])


def openbookqa(line: dict[str, Any]) -> Question:
    """Make a question from a line of OpenBookQA.

    Args:
        line: One object of the .jsonl file.

    Returns:
        The question.
    """
    return choices(line["question"], line["choices"], line["label"])


def hellaswag(line: dict[str, Any]) -> Question:
    """Make a question from a line of HellaSwag.

    Differs from lm-eval: the context in the local file is already cleaned, and its second half is in lower case.

    Args:
        line: One object of the .jsonl file.

    Returns:
        The question.
    """
    return choices(line["ctx"], line["endings"], line["label"])


def boolq(line: dict[str, Any]) -> Question:
    """Make a question from a line of BoolQ.

    Args:
        line: One object of the .jsonl file.

    Returns:
        The question.
    """
    return choices(f"{line['passage']}\nQuestion: {line['question']}?\nAnswer:", ["no", "yes"], int(line["label"]))


def rte(line: dict[str, Any]) -> Question:
    """Make a question from a line of RTE.

    Args:
        line: One object of the .jsonl file.

    Returns:
        The question.
    """
    text = f"{line['premise']}\nQuestion: {line['hypothesis']} True or False?\nAnswer:"
    return choices(text, ["True", "False"], ["entailment", "not_entailment"].index(line["label"]))


def winogrande(line: dict[str, Any]) -> Question:
    """Make a question from a line of WinoGrande.

    The options are part of the context.  The continuation is the same for both: the rest of the sentence.

    Args:
        line: One object of the .jsonl file.

    Returns:
        The question.
    """
    before, _, after = line["sentence"].partition("_")
    contexts = (before + line["option1"], before + line["option2"])
    return Question(contexts, (f" {after.strip()}",) * 2, tuple(map(len, contexts)), int(line["answer"]) - 1)


def read(
    path: str | os.PathLike, task: Callable[[dict[str, Any]], Question], limit: int | None = None
) -> list[Question]:
    """Read the questions of a .jsonl file.

    Args:
        path: The file, plain or packed.
        task: Makes a question of one object, such as `arc`.
        limit: Read the first `limit` questions only; None reads all.

    Returns:
        The questions.
    """
    questions, lines = [], bounded.text(path).split("\n")
    # splitlines would also split at U+2028 and U+0085, which a JSON text may contain.
    for number, line in [pair for pair in enumerate(lines, 1) if pair[1].strip()][:limit]:
        try:
            questions.append(task(json.loads(line)))
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: no question of {task.__name__}: {error!r}") from error
    return questions


# Scoring.


def scorer(
    model: Model, params: Params, tokenizer: Tokenizer, *, batch_size: int = 8
) -> Callable[[Sequence[tuple[str, str]]], list[Likelihood]]:
    """Make a function that scores texts with a model.

    Args:
        model: The model.
        params: Its parameters.
        tokenizer: Its tokenizer.
        batch_size: Pairs per batch.

    Returns:
        A function from (context, continuation) pairs to their likelihoods.
    """

    def score(pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        return likelihoods(model, params, [encode_pair(tokenizer, *pair) for pair in pairs], batch_size=batch_size)

    return score


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Encode context and continuation together, and split the tokens where the context ends.

    The last spaces of the context belong to the continuation, as in lm-eval.

    Args:
        tokenizer: The tokenizer.
        context: Text before the continuation.
        continuation: The continuation.

    Returns:
        The tokens of the context, and those of the continuation.
    """
    kept = context.rstrip()
    begin = tokenizer.encode(kept)
    return begin, tokenizer.encode(context + continuation)[len(begin) :]


def accuracy(score: Callable[[Sequence[tuple[str, str]]], list[Likelihood]], questions: Sequence[Question]) -> Accuracy:
    """Compute lm-eval's acc and acc_norm; the first option wins among equals.

    >>> accuracy(lambda pairs: [(-float(len(text)), True) for _, text in pairs], [choices("", ["a", "bcd"], 0)])
    Accuracy(acc=1.0, acc_norm=0.0, count=1)

    Args:
        score: Function from (context, continuation) pairs to their likelihoods, as `scorer` makes it.
        questions: The questions, at least one.

    Returns:
        The accuracies.
    """
    if not questions:
        raise ValueError("questions is empty; allowed: at least one")
    pairs = [pair for question in questions for pair in zip(question.contexts, question.continuations)]
    logs = iter(score(pairs))
    right, normed = [], []
    for question in questions:
        values = np.array([next(logs)[0] for _ in question.contexts])
        right.append(int(np.argmax(values)) == question.answer)
        normed.append(int(np.argmax(values / np.array(question.lengths))) == question.answer)
    return Accuracy(float(np.mean(right)), float(np.mean(normed)), len(questions))


def likelihoods(model: Model, params: Params, pairs: Sequence[Pair], *, batch_size: int = 8) -> list[Likelihood]:
    """Compute log p(continuation | context) of every pair, and whether greedy decoding gives the continuation.

    The first tokens of a pair that is too long are dropped.  Batches hold pairs of similar length.

    Args:
        model: The model.
        params: Its parameters.
        pairs: Tokens of contexts and continuations.
        batch_size: Pairs per batch.

    Returns:
        For every pair, the log-likelihood in nats, and whether every token of the continuation is the likeliest one.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; allowed: at least 1")
    most = model.config.max_position_embeddings
    for context, continuation in pairs:
        if not context or not 0 < len(continuation) <= most:
            raise ValueError(
                f"a pair has {len(context)} and {len(continuation)} tokens; allowed: a context of at least 1 and a "
                f"continuation of 1 to max_position_embeddings={most}"
            )
    whole = [np.array([*context, *continuation][-(most + 1) :], np.int32) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda i: len(whole[i]))
    results: list[Likelihood] = [(0.0, False)] * len(pairs)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        length = min(most, _rounded(max(len(whole[i]) for i in rows) - 1))
        windows = np.zeros((batch_size, length + 1), np.int32)  # padding on the right changes nothing
        for row, i in enumerate(rows):
            windows[row, : len(whole[i])] = whole[i]
        logs, greedy = _score(model, params, windows, batch_size)
        for row, i in enumerate(rows):
            part = slice(len(whole[i]) - 1 - len(pairs[i][1]), len(whole[i]) - 1)
            results[i] = float(logs[row, part].sum()), bool(greedy[row, part].all())
    return results


def _rounded(length: int) -> int:
    return _SHORTEST * 2 ** max(0, math.ceil(math.log2(length / _SHORTEST)))


def _score(
    model: Model, params: Params, windows: Int[np.ndarray, "b t"], batch_size: int
) -> tuple[Float[np.ndarray, "b s"], Bool[np.ndarray, "b s"]]:
    hidden = embed(model, params.outer, windows[:, :-1], batch_size)
    for block in params.blocks:
        advance(model, block, hidden)
    logs, greedy = _tokens(model.head, params.outer, hidden[0], jnp.asarray(windows[:, 1:]))
    return np.asarray(logs, np.float64), np.asarray(greedy)


@partial(jax.jit, static_argnames="head")
def _tokens(
    head: Callable[[Layers, Hidden], Float[Array, "b t vocab"]], outer: Layers, h: Hidden, targets: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """Return log p of every target, and whether it is the likeliest token."""

    def token(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        h, target = pair
        logits = head(outer, h[None, None])[0, 0].astype(jnp.float32)
        return logits[target] - jax.nn.logsumexp(logits), jax.lax.argmax(logits, 0, target.dtype) == target

    pairs = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    return jax.tree.map(lambda a: a.reshape(targets.shape), jax.lax.map(token, pairs, batch_size=_POSITIONS))
