from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3lab.config.errors import IntegrityError
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.gguf import open_gguf, read_tensor
from eagle3lab.verifier.smollm2 import convert_smollm2, half_split_rotary

from .conftest import MINI, TEMPLATE, TOKENS

Mini = tuple[Path, dict[str, tuple[str, bytes]]]


def dequantised(kind: str, data: bytes) -> list[float]:
    """One value at a time, from the format's description."""
    if kind == "f32":
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    values: list[float] = []
    if kind == "q8_0":
        for at in range(0, len(data), 34):
            (scale,) = struct.unpack_from("<e", data, at)
            values += [scale * q for q in struct.unpack_from("<32b", data, at + 2)]
        return values
    for at in range(0, len(data), 20):
        scale, minimum = struct.unpack_from("<ee", data, at)
        nibbles = data[at + 4 : at + 20]
        values += [scale * (b & 0xF) + minimum for b in nibbles]
        values += [scale * (b >> 4) + minimum for b in nibbles]
    return values


@pytest.fixture(scope="module")
def converted(mini_gguf: Mini, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert_smollm2(mini_gguf[0], directory)
    return directory


def test_every_tensor_is_dequantised_as_the_format_says(mini_gguf: Mini) -> None:
    file = open_gguf(mini_gguf[0])
    assert set(file.tensors) == set(mini_gguf[1])
    for name, (kind, data) in mini_gguf[1].items():
        values = read_tensor(file, name)
        np.testing.assert_allclose(values.ravel(), dequantised(kind, data), rtol=1e-6, atol=1e-7)


def test_converted_values_are_the_bf16_of_the_dequantised_ones(mini_gguf: Mini, converted: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    kind, data = mini_gguf[1]["blk.1.ffn_down.weight"]
    expected = torch.tensor(dequantised(kind, data)).reshape(MINI["hidden"], MINI["width"])
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype is torch.bfloat16
    torch.testing.assert_close(
        tensors["model.layers.1.mlp.down_proj.weight"], expected.bfloat16(), rtol=2**-7, atol=0
    )


def test_reordered_queries_and_keys_give_the_same_attention_scores() -> None:
    rng = np.random.default_rng(1)
    heads, width, hidden = 3, 8, 5
    query, key = rng.normal(size=(2, heads * width, hidden))
    x, y = rng.normal(size=(2, hidden))

    def interleaved(vector: np.ndarray, position: int) -> np.ndarray:
        out = vector.copy()
        for i in range(width // 2):
            angle = position * 10000 ** (-2 * i / width)
            a, b = vector[2 * i], vector[2 * i + 1]
            out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def half_split(vector: np.ndarray, position: int) -> np.ndarray:
        half = width // 2
        angle = position * 10000 ** (-2 * np.arange(half) / width)
        a, b = vector[:half], vector[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        before = interleaved(query[rows] @ x, 7) @ interleaved(key[rows] @ y, 3)
        new_query, new_key = half_split_rotary(query, heads)[rows], half_split_rotary(key, heads)[rows]
        assert half_split(new_query @ x, 7) @ half_split(new_key @ y, 3) == pytest.approx(before)


def test_directory_loads_and_runs_in_transformers(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 9]])).logits
    assert logits.shape == (1, 3, len(TOKENS))
    assert torch.isfinite(logits).all()
    facts = read_facts(converted)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (2, 1, 32)
    assert (facts.rms_norm_eps, facts.rope_parameters["rope_theta"]) == (1e-5, 100000.0)
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2,), 2)
    assert facts.tie_word_embeddings


def test_tokenizer_merges_splits_digits_and_knows_its_control_tokens(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("hi hi 123<|im_end|>"))
    assert tokens == ["hi", "\u0120hi", "\u0120", "1", "2", "3", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("a b\nc")) == "a b\nc"
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special_tokens=True) == "hi"
    assert tokenizer.chat_template == TEMPLATE


def test_same_input_gives_the_same_bytes(mini_gguf: Mini, converted: Path, tmp_path: Path) -> None:
    convert_smollm2(mini_gguf[0], tmp_path)
    for file in converted.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("cut", [0, 3, 30, 500, -5000])
def test_cut_gguf_is_an_integrity_error(cut: int, mini_gguf: Mini, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(mini_gguf[0].read_bytes()[:cut])
    with pytest.raises(IntegrityError):
        convert_smollm2(short, tmp_path)


def test_another_model_is_refused(mini_gguf: Mini, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(mini_gguf[0].read_bytes().replace(b"smollm", b"llama3"))
    with pytest.raises(IntegrityError, match="llama3"):
        convert_smollm2(other, tmp_path)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    from eagle3lab.config.schema import ModelConfig, VerifierSource
    from eagle3lab.verifier.locate import locate_verifier

    path = locate_verifier(ModelConfig(name="smollm2_135m", source=VerifierSource.smollm2_135m))
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 30
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    out = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"
    for text in (
        "  two  spaces",
        "tab\tnew\r\nline\n\n",
        "12345 007",
        "naive\u0308 \u65e5\u672c \U0001f642",
        "\x00",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
