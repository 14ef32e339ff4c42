"""Nats per token: the field's protocol, block by block."""

import functools
import json
import lzma
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import llm
from commjax.llm import base, llama2c, perplexity, tokens
from tests.llm import tiny

pytestmark = pytest.mark.slow

ADVANCE, ENTROPIES = cast(Any, perplexity.advance_once), cast(Any, perplexity._entropies)  # jitted


def load(tmp_path, case="llama grouped queries"):
    return llm.load(tiny.golden(tmp_path, case))


@functools.cache
def forward(config):
    return jax.jit(lambda params, tokens: base.forward(llm.model(config), params, tokens))


def oracle(model, params, window):
    """-log softmax of one window in float64."""
    logits = np.asarray(forward(model.config)(params, jnp.asarray(window[None], jnp.int32))[0], np.float64)
    log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log[np.arange(len(window) - 1), window[1:]]


@pytest.mark.parametrize("case", ["llama grouped queries", "opt projections"])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 8])
def test_every_window_counts_once_whatever_the_batches(case, batch_size, tmp_path):
    model, params = load(tmp_path, case)
    windows = np.random.default_rng(0).integers(0, 29, (5, 12)).astype(np.int32)
    found = perplexity.losses(model, params.outer, params.blocks, windows, batch_size=batch_size)
    np.testing.assert_allclose(found.nats, [oracle(model, params, one).sum() for one in windows], rtol=1e-5)
    assert found.targets.tolist() == [11] * 5


def test_the_protocol_of_the_pruning_papers(tmp_path):
    """exp(sum over windows of (mean over seqlen - 1 targets) * seqlen / (windows * seqlen))."""
    model, params = load(tmp_path)
    windows = np.random.default_rng(1).integers(0, 29, (4, 9)).astype(np.int32)
    nlls = [oracle(model, params, one).mean() * 9 for one in windows]
    found = perplexity.losses(model, params.outer, params.blocks, windows)
    np.testing.assert_allclose(perplexity.perplexity(found), math.exp(sum(nlls) / (4 * 9)), rtol=1e-5)


def test_padding_is_not_counted(tmp_path):
    model, params = load(tmp_path)
    rows = [np.random.default_rng(i).integers(0, 29, n) for i, n in enumerate((2, 7, 10))]
    windows, lengths = tokens.padded([row.tolist() for row in rows], 10)
    found = perplexity.losses(model, params.outer, params.blocks, windows, lengths)
    wanted = [oracle(model, params, row).sum() for row in rows]
    np.testing.assert_allclose(found.nats, wanted, rtol=1e-5)
    assert found.targets.tolist() == [1, 6, 9]
    np.testing.assert_allclose(perplexity.nats_per_token(found), sum(wanted) / 16, rtol=1e-5)


@pytest.mark.parametrize("positions", [1, 7, 1000])
def test_positions_in_chunks_give_the_same(positions, tmp_path, monkeypatch):
    model, params = load(tmp_path)
    windows = np.random.default_rng(2).integers(0, 29, (3, 6)).astype(np.int32)
    monkeypatch.setattr(perplexity, "_POSITIONS", positions)
    ENTROPIES.clear_cache()
    found = perplexity.losses(model, params.outer, params.blocks, windows)
    ENTROPIES.clear_cache()
    np.testing.assert_allclose(found.nats, [oracle(model, params, one).sum() for one in windows], rtol=1e-5)


def test_blocks_may_come_from_the_disk_and_nothing_is_compiled_twice(tmp_path):
    checkpoint = llm.open_folder(tiny.golden(tmp_path, "llama tied"))
    windows = np.random.default_rng(3).integers(0, 29, (5, 13)).astype(np.int32)

    def streamed():
        blocks = (llm.read_block(checkpoint, i) for i in range(2))
        return perplexity.losses(checkpoint.model, llm.read_outer(checkpoint), blocks, windows, batch_size=2)

    before = ADVANCE._cache_size()
    first = streamed()
    model, params = llm.load(checkpoint.folder)
    second = perplexity.losses(model, params.outer, params.blocks, windows, batch_size=2)
    assert first.nats.tolist() == second.nats.tolist()
    assert ADVANCE._cache_size() == before + 1


def test_bad_windows_are_refused(tmp_path):
    model, params = load(tmp_path)
    good = np.ones((2, 5), np.int32)

    def run(windows, lengths=None, blocks=params.blocks, **options):
        return perplexity.losses(model, params.outer, blocks, windows, lengths, **options)

    for windows, message in (
        (np.ones((2, 1), np.int32), r"windows has shape \(2, 1\); allowed: .* at least 2 tokens"),
        (np.ones((0, 5), np.int32), r"windows has shape \(0, 5\); allowed: at least one window"),
        (np.full((2, 5), 29, np.int32), r"windows has tokens 29..29; allowed: 0..28"),
        (np.full((2, 5), -1, np.int32), r"windows has tokens -1..-1; allowed: 0..28"),
    ):
        with pytest.raises(ValueError, match=message):
            run(windows)
    for lengths in ([1, 5], [5, 6], [5]):
        with pytest.raises(ValueError, match=r"lengths=.*; allowed: 2 whole numbers in 2..5"):
            run(good, np.array(lengths))
    with pytest.raises(ValueError, match=r"batch_size=0; allowed: at least 1"):
        run(good, batch_size=0)
    with pytest.raises(ValueError, match=r"blocks gave 1 blocks; allowed: num_hidden_layers=2"):
        run(good, blocks=params.blocks[:1])
    run(np.full((1, 2), 28, np.int32), np.array([2]))


def read_stories(folder, count):
    tokenizer = tokens.llama2c(f"{folder}/stories/tok512.bin")
    with lzma.open(f"{folder}/stories/tinystories_train_first1000.json.xz") as file:
        ids = [tokenizer.encode(story) for story in json.load(file)[:count]]
    return *llama2c.read(f"{folder}/stories/stories260K.bin"), ids


def test_stories260k_on_whole_stories(real_data):
    """60 stories, cut at the 512 tokens that the model was trained for."""
    model, params, ids = read_stories(real_data, 60)
    windows, lengths = tokens.padded(ids, 512)
    found = perplexity.losses(model, params.outer, params.blocks, windows, lengths)
    assert round(perplexity.nats_per_token(found), 3) == 1.422


@pytest.mark.long
def test_stories260k_on_windows(real_data):
    """All 1000 stories in a row, in 1872 windows of 256 tokens, most of which begin in the middle of a story."""
    model, params, ids = read_stories(real_data, 1000)
    windows = tokens.evaluation_windows([token for story in ids for token in story], 256)
    found = perplexity.losses(model, params.outer, params.blocks, windows)
    assert len(windows) == 1872
    assert round(perplexity.nats_per_token(found), 3) == 1.664 and round(perplexity.perplexity(found), 2) == 5.28
