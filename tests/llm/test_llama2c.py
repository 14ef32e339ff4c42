"""llama2.c files against a NumPy forward pass in llama2.c's own conventions."""

import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from commjax import llm
from commjax.llm import base, checkpoints, llama2c, tokens

pytestmark = pytest.mark.slow

DIM, INNER, BLOCKS, HEADS, KV, VOCAB, LENGTH = 16, 12, 2, 4, 2, 11, 10
HEAD = DIM // HEADS
MATRICES = {"wq": (DIM, DIM), "wk": (KV * HEAD, DIM), "wv": (KV * HEAD, DIM), "wo": (DIM, DIM)}
MATRICES |= {"w1": (INNER, DIM), "w2": (DIM, INNER), "w3": (INNER, DIM)}


def random_model(tied):
    draw = np.random.default_rng(0).standard_normal
    parts = {"embedding": draw((VOCAB, DIM)), "attention norm": 1 + 0.2 * draw((BLOCKS, DIM))}
    parts |= {name: draw((BLOCKS, *MATRICES[name])) / 3 for name in ("wq", "wk", "wv", "wo")}
    parts |= {"ffn norm": 1 + 0.2 * draw((BLOCKS, DIM))}
    parts |= {name: draw((BLOCKS, *MATRICES[name])) / 3 for name in ("w1", "w2", "w3")}
    parts |= {"last norm": 1 + 0.2 * draw(DIM), "cos": draw((LENGTH, HEAD // 2)), "sin": draw((LENGTH, HEAD // 2))}
    parts |= {} if tied else {"head": draw((VOCAB, DIM))}
    return {name: part.astype(np.float32) for name, part in parts.items()}


def write(path, parts, header=None):
    tied = "head" not in parts
    header = header or (DIM, INNER, BLOCKS, HEADS, KV, VOCAB if tied else -VOCAB, LENGTH)
    path.write_bytes(struct.pack("<7i", *header) + b"".join(part.tobytes() for part in parts.values()))
    return path


def forward(parts, ids):
    """run.c: token by token, rotary positions on neighbours (2i, 2i + 1), float64."""

    def norm(x, scale):
        return scale * x / np.sqrt(np.mean(x**2) + 1e-5)

    def turn(x, position):
        out = np.empty_like(x)
        for i in range(0, len(x), 2):
            angle = position / 10000 ** ((i % HEAD) / HEAD)
            pair = (x[i] + 1j * x[i + 1]) * np.exp(1j * angle)
            out[i], out[i + 1] = pair.real, pair.imag
        return out

    parts = {name: part.astype(np.float64) for name, part in parts.items()}
    keys, values = [[] for _ in range(BLOCKS)], [[] for _ in range(BLOCKS)]
    logits = []
    for position, token in enumerate(ids):
        x = parts["embedding"][token]
        for block in range(BLOCKS):
            a = norm(x, parts["attention norm"][block])
            q = turn(parts["wq"][block] @ a, position).reshape(HEADS, HEAD)
            keys[block].append(turn(parts["wk"][block] @ a, position).reshape(KV, HEAD))
            values[block].append((parts["wv"][block] @ a).reshape(KV, HEAD))
            read = []
            for head in range(HEADS):
                scores = np.array([k[head // (HEADS // KV)] @ q[head] / math.sqrt(HEAD) for k in keys[block]])
                weights = np.exp(scores - scores.max())
                past = np.array([v[head // (HEADS // KV)] for v in values[block]])
                read.append(weights / weights.sum() @ past)
            x = x + parts["wo"][block] @ np.concatenate(read)
            m = norm(x, parts["ffn norm"][block])
            gate = parts["w1"][block] @ m
            x = x + parts["w2"][block] @ (gate / (1 + np.exp(-gate)) * (parts["w3"][block] @ m))
        logits.append(parts.get("head", parts["embedding"]) @ norm(x, parts["last norm"]))
    return np.array(logits)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_llama2c(tied, tmp_path):
    parts = random_model(tied)
    model, params = llama2c.read(write(tmp_path / "model.bin", parts))
    ids = [1, 10, 3, 3, 0, 7, 9, 2]
    found = base.forward(model, params, jnp.asarray([ids], jnp.int32))
    assert found.dtype == jnp.float32 and model.config.tie_word_embeddings == tied
    np.testing.assert_allclose(found[0], forward(parts, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_the_same_model(tied, tmp_path):
    path = write(tmp_path / "model.bin", random_model(tied))
    model, params = llama2c.read(path)
    (tmp_path / "tok.bin").write_bytes(b"tokens")
    llama2c.to_hugging_face(path, tmp_path / "folder", tmp_path / "tok.bin")
    again, found = llm.load(tmp_path / "folder")
    assert again is model and (tmp_path / "folder" / checkpoints.TOKENIZER).read_bytes() == b"tokens"
    for a, b in zip(found.blocks, params.blocks):
        assert all(np.array_equal(a[name][kind], leaf) for name, layer in b.items() for kind, leaf in layer.items())
    llama2c.to_hugging_face(path, tmp_path / "without")
    names = sorted(file.name for file in (tmp_path / "without").iterdir())
    assert names == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="exists; allowed: a new folder"):
        llama2c.to_hugging_face(path, tmp_path / "folder")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((DIM, INNER, BLOCKS, HEADS, KV, VOCAB, LENGTH + 1), r"holds 2984 numbers; allowed by its header .*: 2988"),
        ((DIM, INNER, BLOCKS, HEADS, KV, -VOCAB, LENGTH), r"holds \d+ numbers; allowed by its header"),
        ((0x616B3432, 1, BLOCKS, HEADS, KV, VOCAB, LENGTH), r"begins with \[1634415666, 1.*; allowed: dim, hidden_dim"),
        ((DIM, 0, BLOCKS, HEADS, KV, VOCAB, LENGTH), r"begins with \[16, 0,"),
        ((DIM, INNER, BLOCKS, HEADS, KV, 0, LENGTH), r"begins with"),
        ((DIM, INNER, BLOCKS, 5, KV, VOCAB, LENGTH), r"dim a multiple of n_heads"),
        ((DIM, INNER, BLOCKS, HEADS, 3, VOCAB, LENGTH), r"num_key_value_heads=3; allowed: a divisor"),
        ((DIM, INNER, BLOCKS, 16, 16, VOCAB, LENGTH), r"head_dim=1; allowed: an even number"),
    ],
)
def test_other_files_are_refused(header, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        llama2c.read(write(tmp_path / "model.bin", random_model(True), header))


@pytest.mark.parametrize("size", [0, 24, 30])
def test_short_files_are_refused(size, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\1" * size)
    with pytest.raises(ValueError, match=rf"has {size} bytes; allowed: a llama2.c file, at least 28"):
        llama2c.read(tmp_path / "model.bin")


def test_stories260k_continues_a_story(real_data):
    """Greedy continuation: a pretrained model, read the right way round, speaks English."""
    model, params = llama2c.read(f"{real_data}/stories/stories260K.bin")
    tokenizer = tokens.llama2c(f"{real_data}/stories/tok512.bin")
    assert model.config.vocab_size == 512 and model.config.num_key_value_heads == 4
    assert sum(leaf.size for block in params.blocks for layer in block.values() for leaf in layer.values()) == 227200
    ids = tokenizer.encode("Once upon a time, there was a little girl named")
    logits = base.forward(model, params, jnp.asarray([ids], jnp.int32))[0, -1]
    assert tokenizer.decode([int(jnp.argmax(logits))]) in ("L", "Li", "Lily", "Lil")
