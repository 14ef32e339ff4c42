"""Zero-shot scoring: likelihoods against the whole softmax, accuracies against lm-eval's own."""

import functools
import json
import logging
import lzma
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import llm
from commjax.llm import tokens
from commjax.pruning import zeroshot
from commjax.pruning.lm_eval import template_lm
from tests.pruning import models

pytestmark = pytest.mark.slow

LONGEST = 48


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = models.folder(tmp_path_factory.mktemp("m") / "model", vocab_size=259, max_position_embeddings=LONGEST)
    models.tokenizer(folder / "tokenizer.bin")
    return *llm.load(folder), tokens.load(folder)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, ids):
    return llm.forward(llm.model(config), params, ids)


def oracle(model, params, context, continuation):
    """One pair, no padding, the softmax in float64."""
    whole = [*context, *continuation][-(LONGEST + 1) :]
    logits = np.asarray(forward(model.config, params, jnp.array([whole[:-1]], jnp.int32))[0], np.float64)
    logits = logits[-len(continuation) :]
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(continuation))
    return logs[rows, continuation].sum(), bool((logits.argmax(axis=1) == continuation).all())


def test_likelihoods_are_those_of_the_whole_softmax(loaded):
    model, params, _ = loaded
    random = np.random.default_rng(0)
    # Up to a length beyond what the model reads: 1 to 40 tokens, then 1 to 20.
    sizes = [(1, 1), (3, 2), (40, 20), (31, 2), (40, 9), (2, LONGEST)]
    pairs = [(random.integers(3, 259, a).tolist(), random.integers(3, 259, b).tolist()) for a, b in sizes]
    # One that greedy decoding would give.
    logits = forward(model.config, params, jnp.array([pairs[1][0]], jnp.int32))[0, -1]
    pairs.append((pairs[1][0], [int(jnp.argmax(logits))]))
    found = zeroshot.likelihoods(model, params, pairs, batch_size=4)
    wanted = [oracle(model, params, *pair) for pair in pairs]
    np.testing.assert_allclose([log for log, _ in found], [log for log, _ in wanted], rtol=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert found[-1][1] and not found[1][1]
    again = zeroshot.likelihoods(model, params, pairs[::-1], batch_size=3)[::-1]
    np.testing.assert_allclose([log for log, _ in found], [log for log, _ in again], rtol=1e-5)


def test_few_shapes_are_compiled():
    assert [zeroshot._rounded(n) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]


@pytest.mark.parametrize("pair", [([], [3]), ([3], []), ([3], [4] * (LONGEST + 1))])
def test_pairs_that_cannot_be_scored_are_refused(pair, loaded):
    message = f"a pair has {len(pair[0])} and {len(pair[1])} tokens; allowed: .* max_position_embeddings={LONGEST}"
    with pytest.raises(ValueError, match=message):
        zeroshot.likelihoods(loaded[0], loaded[1], [([5], [6]), pair])
    with pytest.raises(ValueError, match="batch_size=0; allowed: at least 1"):
        zeroshot.likelihoods(loaded[0], loaded[1], [([5], [6])], batch_size=0)


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(loaded):
    encode = loaded[2].encode
    assert zeroshot.encode_pair(loaded[2], "a b ", "c") == (encode("a b"), encode("a b c")[len(encode("a b")) :])
    assert zeroshot.encode_pair(loaded[2], "a b", " c") == zeroshot.encode_pair(loaded[2], "a b ", "c")


LINES = {
    zeroshot.arc: {"question": "Why?", "choices": ["So.", "Not so."], "label": 1},
    zeroshot.openbookqa: {"question": "The sun is", "choices": ["hot", "cold"], "label": 0},
    zeroshot.hellaswag: {"ctx": "A man: he", "endings": ["runs.", "is ripping.", "x", "y"], "label": 3},
    zeroshot.boolq: {"question": "is it", "passage": "It is.", "label": True},
    zeroshot.rte: {"premise": "It rains.", "hypothesis": "It is wet.", "label": "not_entailment"},
    zeroshot.winogrande: {
        "sentence": "Sarah saw Maria, so _ ran .",
        "option1": "Sarah",
        "option2": "Maria",
        "answer": "2",
    },
}
WANTED = {
    zeroshot.arc: (["Question: Why?\nAnswer:"] * 2, [" So.", " Not so."], [3, 7], 1),
    zeroshot.openbookqa: (["The sun is"] * 2, [" hot", " cold"], [3, 4], 0),
    zeroshot.hellaswag: (["A man: he"] * 4, [" runs.", " is ripping.", " x", " y"], [5, 11, 1, 1], 3),
    zeroshot.boolq: (["It is.\nQuestion: is it?\nAnswer:"] * 2, [" no", " yes"], [2, 3], 1),
    zeroshot.rte: (["It rains.\nQuestion: It is wet. True or False?\nAnswer:"] * 2, [" True", " False"], [4, 5], 1),
    zeroshot.winogrande: (["Sarah saw Maria, so Sarah", "Sarah saw Maria, so Maria"], [" ran ."] * 2, [25, 25], 1),
}


@pytest.mark.parametrize("task", LINES, ids=lambda task: task.__name__)
def test_questions_of_every_file(task, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(LINES[task]) + "\n")
    (tmp_path / "q.jsonl.xz").write_bytes(lzma.compress((tmp_path / "q.jsonl").read_bytes() * 3))
    contexts, continuations, lengths, answer = WANTED[task]
    wanted = zeroshot.Question(tuple(contexts), tuple(continuations), tuple(lengths), answer)
    assert zeroshot.read(tmp_path / "q.jsonl", task) == [wanted]
    assert zeroshot.read(tmp_path / "q.jsonl.xz", task, limit=2) == [wanted] * 2


def test_a_line_ends_at_a_line_feed_only(tmp_path):
    line = {"question": "One\u2028two\x85three", "choices": ["a", "b"], "label": 0}
    (tmp_path / "q.jsonl").write_bytes((json.dumps(line, ensure_ascii=False) + "\r\n\n").encode() * 2)
    found = zeroshot.read(tmp_path / "q.jsonl", zeroshot.openbookqa)
    assert [one.contexts[0] for one in found] == ["One\u2028two\x85three"] * 2
    assert len(zeroshot.read(tmp_path / "q.jsonl", zeroshot.openbookqa, limit=1)) == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"question": "Why?"}', "line 2: no question of arc: KeyError"),
        ('{"question": "Why?", "choices": ["a"], "label": 1}', "answer=1; allowed: 0 to 0"),
        ('{"question": "Why?", "choices": ["a"], "label": -1}', "answer=-1"),
        ("torn {", "line 2: no question of arc"),
    ],
)
def test_lines_that_are_no_questions_are_refused(line, message, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(LINES[zeroshot.arc]) + "\n" + line)
    with pytest.raises(ValueError, match=message):
        zeroshot.read(tmp_path / "q.jsonl", zeroshot.arc)


def test_accuracy_by_hand():
    logs = {" a": -1.0, " bb": -1.5, " cccc": -2.0}

    def score(pairs):
        return [(logs[continuation], False) for _, continuation in pairs]

    questions = [zeroshot.choices("", ["a", "bb", "cccc"], answer) for answer in (0, 0, 1, 2)]
    found = zeroshot.accuracy(score, questions)  # a is likeliest, cccc per character
    assert found == zeroshot.Accuracy(0.5, 0.25, 4) and found.deviation == pytest.approx((0.25 / 3) ** 0.5)
    tied = zeroshot.accuracy(lambda pairs: [(-1.0, True)] * len(pairs), [zeroshot.choices("", ["a", "b"], 0)])
    assert tied.acc == 1 and tied.deviation == 0
    with pytest.raises(ValueError, match="questions is empty"):
        zeroshot.accuracy(score, [])


# lm-eval's own.


@pytest.fixture
def lm_eval(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # others' deprecations
        found = pytest.importorskip("lm_eval")
        pytest.importorskip("lm_eval.api.model")
        yield found


@pytest.mark.extra
@pytest.mark.long
def test_lm_eval_gives_the_same_accuracies(lm_eval, loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    logging.disable(logging.CRITICAL)
    random = np.random.default_rng(1)
    words = ["a", "it", "word", "three times", "ü", "none of these at all"]
    lines = [
        {"question": f"{i}?", "choices": random.permutation(words)[: 2 + i % 3].tolist(), "label": int(i % 2)}
        for i in range(12)
    ]
    path = tmp_path / "arc.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }
    face = template_lm(*loaded, batch_size=5)
    results = lm_eval.simple_evaluate(model=face, tasks=[task], bootstrap_iters=0, verbosity="ERROR")["results"]
    logging.disable(logging.NOTSET)
    found = zeroshot.accuracy(zeroshot.scorer(*loaded), zeroshot.read(path, zeroshot.arc))
    assert (results["local"]["acc,none"], results["local"]["acc_norm,none"]) == (found.acc, found.acc_norm)
    assert 0 < found.acc < 1 and found.acc != found.acc_norm


@pytest.mark.extra
def test_the_face_of_lm_eval(lm_eval, loaded):
    model, params, tokenizer = loaded
    face = template_lm(*loaded, eot=7)
    assert face.eot_token_id == 7 and face.prefix_token_id == tokens.BOS
    assert face.tok_encode("ab") == tokenizer.encode("ab")
    assert face.tok_encode("ab", add_special_tokens=False) == tokenizer.encode("ab")[1:]
    bare = template_lm(model, params, tokenizer._replace(encode=lambda text: list(text.encode())), eot=7)
    assert bare.prefix_token_id == 7 and bare.tok_encode("a", add_special_tokens=False) == [97]

    def request(*arguments):
        return SimpleNamespace(args=arguments)

    pairs = [("", "abc"), ("some text ", "goes on")]
    found = face.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    wanted = [oracle(model, params, *zeroshot.encode_pair(tokenizer, *pair)) for pair in pairs]
    np.testing.assert_allclose([log for log, _ in found], [log for log, _ in wanted], rtol=1e-5)
    # Rolling: 110 tokens in windows of 48, each token predicted once.
    text = "x" * 50 + "yz" * 30
    ids = tokenizer.encode(text)[1:]
    assert len(ids) == 111
    whole = [oracle(model, params, [tokens.BOS], ids[:LONGEST])[0]]
    whole.append(oracle(model, params, ids[LONGEST - 1 : LONGEST], ids[LONGEST : 2 * LONGEST])[0])
    whole.append(oracle(model, params, ids[-LONGEST - 1 : -(len(ids) - 2 * LONGEST)], ids[2 * LONGEST :])[0])
    np.testing.assert_allclose(face.loglikelihood_rolling([request(text)]), [sum(whole)], rtol=1e-5)
    with pytest.raises(NotImplementedError, match="gives likelihoods"):
        face.generate_until([])


def test_without_lm_eval_the_extra_is_named(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'commjax\[eval\]'"):
        template_lm(*loaded)


@pytest.mark.parametrize(
    "name, task, count",
    [
        ("arc_easy_test", zeroshot.arc, 2376),
        ("arc_challenge_test", zeroshot.arc, 1172),
        ("openbookqa_test", zeroshot.openbookqa, 500),
        ("hellaswag_val", zeroshot.hellaswag, 10042),
        ("boolq_val", zeroshot.boolq, 3270),
        ("rte_val", zeroshot.rte, 277),
        ("winogrande_val", zeroshot.winogrande, 1267),
    ],
)
def test_the_real_files_are_read(real_data, name, task, count):
    found = zeroshot.read(f"{real_data}/zeroshot/{name}.jsonl.xz", task)
    assert len(found) == count and len({one.answer for one in found}) > 1
