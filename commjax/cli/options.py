"""The options of `commjax prune` and `commjax perplexity`: one frozen dataclass per command, method and way to regrow.

A field is an option, and its line under "Attributes" is the help text.  To add a method, write its dataclass and add it
to `METHODS`.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from commjax.pruning import regrow as regrowing
from commjax.pruning import scores
from commjax.pruning.masks import Group
from commjax.pruning.recipe import Choice, choose
from commjax.pruning.regrow import Regularizer
from commjax.pruning.scores import Axis

try:
    from tyro import conf
except ImportError:  # without the extra `cli` there is a help text and nothing else, so no hints are needed
    conf = None


def _arg(**hints: Any) -> object:
    """A hint to tyro on how an option is shown."""
    return conf and conf.arg(**hints)


def _subcommand(name: str) -> object:
    """A hint to tyro on the name of a sub-command."""
    return conf and conf.subcommand(name)


# Options whose default is None, with the text that the help shows instead of "None".
Window = Annotated[int | None, _arg(metavar="INT", help_behavior_hint="(default: the model's longest, at most 2048)")]
Tokenizer = Annotated[
    Path | None, _arg(metavar="FILE", help_behavior_hint="(default: tok<size>.bin or tokenizer.bin beside it)")
]
SameSign = Annotated[bool | None, _arg(help_behavior_hint="(default: True with a pattern, else False)")]
JoinName = Literal["relative", "relative_to_sum", "plain", "harmonic", "root"]


@dataclass(frozen=True)
class _Joined:
    """The option of a score that joins two norms.

    Attributes:
        join: plain |W|(u+v), root |W| sqrt(u^2+v^2), relative |W|/u+|W|/v, relative_to_sum |W|/(u+v), harmonic
            |W|/(1/u+1/v), where u and v are the norms.
    """

    join: JoinName = "plain"


@dataclass(frozen=True)
class Magnitude:
    """|W|, the size of the weight."""


@dataclass(frozen=True)
class Wanda:
    """|W| |X_j|^alpha, with the norms of the layer's inputs.

    Attributes:
        alpha: Power of the norms of the inputs.
    """

    alpha: float = 1.0


@dataclass(frozen=True)
class OWanda:
    """|W| |Y_k|, with the norms of the layer's outputs."""


@dataclass(frozen=True)
class SymWanda(_Joined):
    """|W| (|X_j| + |Y_k|), with the norms of inputs and outputs."""


@dataclass(frozen=True)
class Symmetric(_Joined):
    """|W| (|W_j| + |W_k|), with norms of the weights."""


@dataclass(frozen=True)
class Ri:
    """|W|/|W_j| + |W|/|W_k|, the relative importance."""


@dataclass(frozen=True)
class Ria:
    """(|W|/|W_j| + |W|/|W_k|) |X_j|^alpha, with norms of weights and inputs.

    Attributes:
        alpha: Power of the norms of the inputs.
        p: Which norm of the weights: 0, 1, 2, ..., inf.
        axes: Norms of the weights of an input, of an output, or both.
        join: relative |W|/u+|W|/v (S1), relative_to_sum |W|/(u+v) (S2), plain |W|(u+v) (S3), harmonic |W|/(1/u+1/v)
            (S4), root |W| sqrt(u^2+v^2), where u and v are the norms.
    """

    alpha: float = 0.5
    p: float = 1.0
    axes: Annotated[tuple[Axis, ...], _arg(metavar="{in,out} ...")] = ("in", "out")
    join: JoinName = "relative"


@dataclass(frozen=True)
class StochRia:
    """As ria, with norms over sampled weights.

    Attributes:
        beta: Share of the weights that is sampled.
        alpha: Power of the norms of the inputs.
        shared: Draw one sample for all inputs and one for all outputs.
    """

    beta: float = 0.1
    alpha: float = 1.0
    shared: bool = False


METHODS = {
    "magnitude": (Magnitude, scores.magnitude),
    "wanda": (Wanda, scores.wanda),
    "owanda": (OWanda, scores.owanda),
    "symwanda": (SymWanda, scores.symwanda),
    "symmetric": (Symmetric, scores.symmetric),
    "ri": (Ri, scores.ri),
    "ria": (Ria, scores.ria),
    "stochria": (StochRia, scores.stoch_ria),
}


@dataclass(frozen=True)
class NoRegrow:
    """No swaps."""


@dataclass(frozen=True)
class Dsnot:
    """DSnoT: swaps until the expected error of an output is near zero.

    Attributes:
        cycles: Largest number of swaps of an output.
        threshold: Expected error at which an output is done.
        power: Power of the variance in the grow rule.
        same_sign: An output is also done when its error would change sign.
        mlp: Also swap in the MLP, where the released DSnoT does not.
    """

    cycles: int = 50
    threshold: float = 0.1
    power: float = 1.0
    same_sign: SameSign = None
    mlp: bool = False


@dataclass(frozen=True)
class _Relative:
    """The options of R^2-DSnoT that DSnoT does not have.

    Attributes:
        relative_grow: Relative importance in the grow rule.
        relative_prune: Relative importance in the prune rule.
        alpha: Power of the norms of the inputs in the prune rule.
        gamma_grow: Weight of the regulariser in the grow rule.
        gamma_prune: Weight of the regulariser in the prune rule.
        p: Which norm the regulariser is: 1, 2, ..., inf.
        regularizer: Norm of the kept weights of the output (as printed), of the input, or of the output after the
            change.
        literal: The printed grow rule, without the weight.
    """

    relative_grow: bool = True
    relative_prune: bool = False
    alpha: float = 0.5
    gamma_grow: float = 0.0
    gamma_prune: float = 0.0
    p: float = 2.0
    regularizer: Regularizer = "out"
    literal: bool = False


@dataclass(frozen=True)
class R2Dsnot(Dsnot, _Relative):  # fields of the last base come first
    """R^2-DSnoT: DSnoT with relative importance and a regulariser."""


REGROW = {
    "none": (NoRegrow, None),
    "dsnot": (Dsnot, regrowing.dsnot),
    "r2dsnot": (R2Dsnot, regrowing.r2_dsnot),
}
Regrow = (
    Annotated[NoRegrow, _subcommand("none")]
    | Annotated[Dsnot, _subcommand("dsnot")]
    | Annotated[R2Dsnot, _subcommand("r2dsnot")]
)
Method = TypeVar("Method")


@dataclass(frozen=True)
class Prune(Generic[Method]):
    """Prune a language model without training, into a new folder.

    The method is the score; the weights of least score are pruned.  To resume a run that was stopped or killed, give
    the same command again: it continues after the last finished block, to the same bits.

    Attributes:
        method: The score; the weights of least score are pruned.
        model: Folder with config.json and safetensors, or .bin file of llama2.c.
        calibration: Text to calibrate on: plain, .json, .jsonl, or one of them packed (.xz, .gz, .bz2).
        out: New folder, which transformers loads.
        sparsity: Share of weights pruned.
        pattern: Keep N of every M inputs, as 2:4, instead of a sparsity.
        group: Weights compete within an output, an input or the layer.
        spread: OWL: sparsities of blocks differ by at most twice this.
        outlier_multiple: OWL: a score above this multiple of the mean is an outlier.
        samples: Number of calibration windows.
        window: Tokens of a window.
        seed: Seed of the windows, and of a score that samples.
        batch_size: Windows per batch.
        tokenizer: Tokenizer of a .bin model.
        regrow: Swap weights back after pruning.
    """

    method: Annotated[Method, conf and conf.OmitArgPrefixes]
    model: Annotated[Path, _arg(metavar="DIR")]
    calibration: Annotated[Path, _arg(metavar="FILE")]
    out: Annotated[Path, _arg(metavar="DIR")]
    sparsity: Annotated[float | None, _arg(metavar="FLOAT", help_behavior_hint="(default: 0.5)")] = None
    pattern: Annotated[str | None, _arg(metavar="N:M", help_behavior_hint="(default: none)")] = None
    group: Group = "output"
    spread: Annotated[float | None, _arg(metavar="FLOAT", help_behavior_hint="(default: no OWL)")] = None
    outlier_multiple: Annotated[float | None, _arg(metavar="FLOAT", help_behavior_hint="(default: 5.0)")] = None
    samples: int = 128
    window: Window = None
    seed: int = 0
    batch_size: int = 8
    tokenizer: Tokenizer = None
    regrow: Regrow = NoRegrow()


@dataclass(frozen=True)
class Perplexity:
    """Measure the perplexity of a model on a text.

    As in the pruning papers: adjacent windows, mean over all predicted tokens.  Several texts of a file are joined by a
    blank line, as WikiText's are; no text gets a beginning token of its own.

    Attributes:
        model: Folder with config.json and safetensors, or .bin file of llama2.c.
        text: Plain text, .json, .jsonl, or one of them packed (.xz, .gz, .bz2).
        window: Tokens of a window.
        batch_size: Windows per batch.
        tokenizer: Tokenizer of a .bin model.
    """

    model: Annotated[Path, _arg(metavar="DIR")]
    text: Annotated[Path, _arg(metavar="FILE")]
    window: Window = None
    batch_size: int = 8
    tokenizer: Tokenizer = None


def choice(table: dict[str, tuple[type, Any]], chosen: Any) -> Choice | None:
    """The function that a dataclass of options belongs to, with all its options.

    >>> choice(METHODS, Wanda(alpha=0.5)).options
    {'alpha': 0.5}

    Args:
        table: `METHODS` or `REGROW`.
        chosen: One of its dataclasses, with values.

    Returns:
        The choice, for a `Recipe`; None for no swaps.
    """
    function = next(function for options, function in table.values() if options is type(chosen))
    given = {field.name: getattr(chosen, field.name) for field in fields(chosen) if field.name != "mlp"}
    if "join" in given:
        given["join"] = getattr(scores, given["join"])
    return None if function is None else choose(function, **given)
