"""Zero-shot accuracy of the dense and the pruned model on local files, by lm-eval (Thesis: Sec. 6.4.3, Table 6.6).

    python -m experiments.symwanda zero-shot --model stories260K --limit 200

The command reads files from $COMMJAX_DATA/zeroshot and needs commjax[eval]. The tasks are worded as in lm-eval 0.4. The
files have one JSON object per line.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from commjax.core.progress import progress_bar
from commjax.data import bounded
from commjax.llm import embedded, tokens
from commjax.llm.tokens import Tokenizer
from commjax.pruning import model as pruning
from commjax.pruning import scores, zeroshot
from commjax.pruning.lm_eval import template_lm
from commjax.pruning.recipe import Recipe, choose
from experiments import tables
from experiments.symwanda.task import Kept, Settings, load


def _before(doc: dict) -> list[str]:
    before = doc["sentence"].partition("_")[0]
    return [before + doc["option1"], before + doc["option2"]]


# The contents of lm-eval's YAML files. If the text is an int, it is the number of the right choice, and the choices are
# contexts.
TASKS: dict[str, dict[str, Any]] = {
    "arc_easy": {
        "file": "arc_easy_test",
        "text": "Question: {{question}}\nAnswer:",
        "choice": "choices",
        "target": "label",
    },
    "arc_challenge": {
        "file": "arc_challenge_test",
        "text": "Question: {{question}}\nAnswer:",
        "choice": "choices",
        "target": "label",
    },
    "openbookqa": {"file": "openbookqa_test", "text": "question", "choice": "choices", "target": "label"},
    "hellaswag": {"file": "hellaswag_val", "text": "ctx", "choice": "endings", "target": "label"},
    "boolq": {
        "file": "boolq_val",
        "text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
        "choice": lambda doc: ["no", "yes"],
        "target": lambda doc: int(doc["label"]),
    },
    "rte": {
        "file": "rte_val",
        "text": "{{premise}}\nQuestion: {{hypothesis}} True or False?\nAnswer:",
        "choice": lambda doc: ["True", "False"],
        "target": lambda doc: ["entailment", "not_entailment"].index(doc["label"]),
    },
    "winogrande": {
        "file": "winogrande_val",
        "text": lambda doc: int(doc["answer"]) - 1,
        "choice": _before,
        "target": lambda doc: doc["sentence"].partition("_")[2].strip(),
    },
}


def config(name: str, folder: Path, limit: int | None) -> dict[str, Any]:
    """Return lm-eval's configuration of a task, with the first `limit` lines of its file."""
    if name not in TASKS:
        raise ValueError(f"tasks={name!r}; allowed: {', '.join(TASKS)}")
    about = TASKS[name]
    path = next(
        (p for p in (folder / f"{about['file']}.jsonl.xz", folder / f"{about['file']}.jsonl") if p.is_file()), None
    )
    if path is None:
        raise ValueError(f"no {about['file']}.jsonl(.xz) in {folder}; allowed: COMMJAX_DATA with a folder zeroshot")
    rows = [json.loads(line) for line in bounded.text(path).split("\n") if line.strip()][:limit]

    def dataset(**kwargs: Any) -> Any:
        import datasets

        return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})

    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]
    return {
        "task": name,
        "custom_dataset": dataset,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": about["text"],
        "doc_to_choice": about["choice"],
        "doc_to_target": about["target"],
        "metric_list": metrics,
    }


def tokenizer(settings: Settings) -> Tokenizer:
    """Return the tokenizer of the model."""
    if settings.model == "topics":
        return embedded.tokenizer()
    if settings.model == "stories260K":
        return tokens.llama2c(Path(os.environ.get("COMMJAX_DATA", "data")) / "stories" / "tok512.bin")
    return tokens.load(settings.model)


def accuracies(face: Any, configs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Evaluate a model with lm-eval.

    Args:
        face: The model, as lm-eval takes it (`lm_eval.template_lm`).
        configs: Configurations of the tasks.

    Returns:
        task -> acc with its standard error, acc_norm, and the number of questions.
    """
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    evaluate: Any = lm_eval.simple_evaluate
    found, rows = evaluate(model=face, tasks=configs, bootstrap_iters=0), {}
    for name, one in found["results"].items():
        count = found["n-samples"][name]["effective"]
        told = zeroshot.Accuracy(one["acc,none"], one["acc_norm,none"], count)
        rows[name] = {"acc": told.acc, "stderr": told.deviation, "acc_norm": told.acc_norm, "count": count}
    return rows


def zero_shot(settings: Settings) -> list[dict]:
    """Compare the dense model with magnitude, Wanda and RIA at `sparsity`, output group, on local files (Table 6.6)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    folder = Path(os.environ.get("COMMJAX_DATA", "data")) / "zeroshot"
    configs = [config(name, folder, settings.limit) for name in settings.tasks]
    task, kept, rows = load(settings), Kept.open(settings), []
    recipes: dict[str, Recipe | None] = {"dense": None}
    for name, choice in {
        "magnitude": choose(scores.magnitude),
        "Wanda": choose(scores.wanda),
        "RIA": choose(scores.ria),
    }.items():
        recipes[f"{name}, {100 * settings.sparsity:g} %"] = Recipe(settings.sparsity, score=choice)

    def measure(recipe: Recipe | None) -> dict[str, dict[str, float]]:
        params = task.params if recipe is None else pruning.prune(task.model, task.params, task.calibration, recipe)[0]
        return accuracies(template_lm(task.model, params, tokenizer(settings)), configs)

    with progress_bar("zero-shot", len(recipes), enabled=settings.progress) as advance:
        for number, (name, recipe) in enumerate(recipes.items()):
            more = {"tasks": settings.tasks, "limit": settings.limit}
            found = kept.get(recipe, lambda recipe=recipe: measure(recipe), **more)
            rows.append({"name": name, "tasks": found})
            mean = sum(one["acc"] for one in found.values()) / len(found)
            advance(number + 1, {"accuracy": mean})
    lines = [f"{Path(settings.model).name}: zero-shot acc +- stderr in %, at most {settings.limit} questions a task"]
    lines.append(f"{'':18}" + "".join(f"{name:>15}" for name in settings.tasks))
    for row in rows:
        cells = [
            f"{100 * row['tasks'][name]['acc']:.1f} +- {100 * row['tasks'][name]['stderr']:.1f}"
            for name in settings.tasks
        ]
        lines.append(f"{row['name']:18}" + "".join(f"{cell:>15}" for cell in cells))
    tables.save(settings.out / f"zero_shot_{Path(settings.model).name}", rows, "\n".join(lines))
    return rows
