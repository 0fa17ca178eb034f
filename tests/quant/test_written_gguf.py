"""`beheld quantize --method gguf`: each architecture is read back as it was, and answers as its own numbers do."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, AutoTokenizer

from beheld import LLM
from beheld.checkpoint.gguf.tokenizer import WORDS, cutting
from beheld.checkpoint.gguf.vocabulary import rule_name
from beheld.checkpoint.info import read_info
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.models import write_gguf
from tests import tiny
from tests.checkpoint.test_gguf import TEXTS, folder_of
from tests.quant.test_gguf import PROMPTS, answers, reference
from tests.quant.test_gguf_families import CASES, EXPERTS, Case, made
from tests.tiny_gguf import permuted

USUAL = CASES | {
    "llama": Case("llama", "Llama", {"head_dim": 16}, {}, {}),
    "llama_biased": Case("llama", "Llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "mistral": Case("llama", "Mistral", {"head_dim": 16, "sliding_window": None}, {}, {}),
    "qwen2": Case("qwen2", "Qwen2", {}, {}, {}),
    "qwen3": Case("qwen3", "Qwen3", {"head_dim": 32}, {}, {}),
    "tied": Case("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {}, {}),
}
TYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
SPARED = ("norm", "mlp.gate.", "shared_expert_gate")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))


def saved(model: Any, folder: Path, tokenizer: str = "qwen2") -> Path:
    """A checkpoint with a tiny tokenizer."""
    model.save_pretrained(folder)
    for file in tiny.checkpoint(tokenizer).iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            shutil.copy(file, folder / file.name)
    return folder


def quantized(source: Path, out: Path, *options: str) -> int:
    return main(["quantize", str(source), str(out), "--method", "gguf", *options])


@pytest.mark.parametrize("name", USUAL)
def test_a_written_file_answers_as_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = made(USUAL[name])
    source = saved(model, tmp_path / "source")
    assert quantized(source, tmp_path / "a.gguf", "--type", "f32") == 0
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert answers(tmp_path / "a.gguf", PROMPTS) == reference(model, tokenizer, PROMPTS)
    assert not list(tmp_path.glob(".*"))


def rounded(model: Any, kind: str) -> None:
    """Round a model's weights as a file does: rows by rows, so neither their order nor stacks matter."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or any(part in name for part in SPARED):
            continue
        finer = kind.startswith(("q4", "q5")) and ("embed_tokens" in name or "lm_head" in name)
        own = Kind["Q8_0" if finer else kind.upper()]
        parameter.data = torch.from_numpy(dequantize(quantize(parameter.data.numpy(), own), own).copy())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_each_type_answers_as_its_numbers(name: str, kind: str, tmp_path: Path) -> None:
    model = made(USUAL[name])
    source = saved(model, tmp_path / "source")
    assert quantized(source, tmp_path / "a.gguf", "--type", kind) == 0
    rounded(model, kind)
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert answers(tmp_path / "a.gguf", PROMPTS) == reference(model, tokenizer, PROMPTS)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tokenizer_template_and_ends_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source = tiny.checkpoint(name)
    assert quantized(source, tmp_path / "a.gguf", "--type", "f16") == 0
    folder = folder_of(tmp_path / "a.gguf")
    found, meant = (AutoTokenizer.from_pretrained(path) for path in (folder, source))
    for text in (*TEXTS, "Привет, мир! 12 345", "مرحبا بالعالم", "日本語の文章です。", "नमस्ते दुनिया", "עברית\r\n\tx"):
        for special in (True, False):
            ids = meant(text, add_special_tokens=special).input_ids
            assert found(text, add_special_tokens=special).input_ids == ids, text
            assert found.decode(ids) == meant.decode(ids)
    turns = [{"role": "user", "content": "What is it?"}]
    rendered = [each.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for each in (found, meant)]
    assert rendered[0] == rendered[1]
    assert found.eos_token_id == meant.eos_token_id
    infos = [read_info(path, EngineArgs(model=str(path))) for path in (folder, source)]
    assert infos[0].eos_ids >= infos[1].eos_ids
    assert infos[0].max_model_len == infos[1].max_model_len


def test_verify_measures_weights_where_tokenizers_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file puts spaces after tokens that are read whole, the checkpoint does not."""
    source, out = tiny.checkpoint("llama"), tmp_path / "a.gguf"
    assert quantized(source, out, "--type", "f32") == 0
    verify = ["verify", str(out), "--unquantized", str(source), "--max-tokens", "4"]
    assert main([*verify, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not told["same_prompt"]
    assert max(told["kl"]) < 1e-6
    assert main(verify) == 0
    assert "makes other tokens of the question" in capsys.readouterr().out


def test_a_warning_about_spaces_is_short_and_says_what_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_gguf.logger, "propagate", True)
    source, out = tiny.checkpoint("llama"), tmp_path / "a.gguf"
    assert quantized(source, out, "--type", "f16") == 0
    (told,) = [record.getMessage() for record in caplog.records if "Spaces" in record.getMessage()]
    assert len(told.replace(str(source), "")) < 260
    assert f"--tokenizer {source}" in told
    prompt = "Look: </s> and </s>so"
    own, back, chosen = (
        LLM(str(model), device="cpu", dtype="float32", max_model_len=64, **options).get_tokenizer()(prompt).input_ids
        for model, options in ((source, {}), (out, {}), (out, {"tokenizer": str(source)}))
    )
    assert back != own
    assert chosen == own


def test_tokens_that_are_read_whole_in_one_of_both_are_no_matter_of_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(made(Case("qwen2", "Qwen2", {"vocab_size": 640}, {}, {})), tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([AddedToken("brandnew", single_word=True)])
    tokenizer.save_pretrained(source)
    assert "does not say all of the tokenizer" in refusal(capsys, source, tmp_path / "a.gguf")


def test_a_published_rule_for_words_keeps_its_name() -> None:
    for name, rule in WORDS.items():
        normalizer, pre_tokenizer = cutting(rule)
        own = Tokenizer(models.BPE())
        own.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            own.normalizer = normalizer
        assert WORDS[rule_name(own, rule.whole)] == rule, name
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ModelError, match="cuts text into words by a rule"):
        rule_name(own, False)


def test_rows_of_rotated_pairs_and_one_added_to_norms_are_as_llama_cpp_has_them(tmp_path: Path) -> None:
    """Read by the package gguf, without our reader."""
    model = made(USUAL["llama"])
    assert quantized(saved(model, tmp_path / "source"), tmp_path / "a.gguf", "--type", "f32") == 0
    stored = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "a.gguf").tensors}
    layer = model.model.layers[1]
    assert np.array_equal(stored["blk.1.attn_q.weight"], permuted(layer.self_attn.q_proj.weight.detach().numpy(), 4))
    assert np.array_equal(stored["blk.1.attn_k.weight"], permuted(layer.self_attn.k_proj.weight.detach().numpy(), 2))
    assert np.array_equal(stored["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight.detach().numpy())
    gemma = made(USUAL["gemma3"])
    assert quantized(saved(gemma, tmp_path / "gemma"), tmp_path / "b.gguf", "--type", "q8_0") == 0
    read = GGUFReader(tmp_path / "b.gguf")
    stored = {tensor.name: tensor.data for tensor in read.tensors}
    norm = gemma.model.layers[0].pre_feedforward_layernorm.weight.detach().numpy()
    assert np.array_equal(stored["blk.0.ffn_norm.weight"], norm + 1)
    kinds = {tensor.name: tensor.tensor_type for tensor in read.tensors}
    assert kinds["blk.0.ffn_norm.weight"] == Kind.F32
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == Kind.Q8_0
    assert read.fields["general.file_type"].contents() == 7
    assert read.fields["gemma3.attention.sliding_window_pattern"].contents() == 6


@pytest.mark.parametrize(
    "positions",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda said: str(said["rope_type"]),
)
def test_scaled_positions_are_read_back(positions: dict[str, Any], tmp_path: Path) -> None:
    options = {"head_dim": 16, "rope_parameters": {"rope_theta": 500000.0, **positions}}
    model = made(Case("llama", "Llama", options, {}, {}))
    source = saved(model, tmp_path / "source")
    assert quantized(source, tmp_path / "a.gguf", "--type", "f32") == 0
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert answers(tmp_path / "a.gguf", PROMPTS) == reference(model, tokenizer, PROMPTS)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert quantized(*arguments) == 1
    return capsys.readouterr().err


def test_what_a_file_cannot_say_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = made(Case("llama", "Mistral", {"head_dim": 16, "sliding_window": 12}, {}, {}))
    said = refusal(capsys, saved(windows, tmp_path / "mistral"), tmp_path / "a.gguf")
    assert "sliding_window is 12, and would be read as None" in said
    scaled = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 256}
    dynamic = made(Case("qwen2", "Qwen2", {"rope_parameters": scaled}, {}, {}))
    assert "rope_parameters is" in refusal(capsys, saved(dynamic, tmp_path / "dynamic"), tmp_path / "a.gguf")
    sparse = made(Case("qwen3moe", "Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": False}, {}, {}))
    assert "norm_topk_prob is False" in refusal(capsys, saved(sparse, tmp_path / "moe"), tmp_path / "a.gguf")
    qwen = saved(made(USUAL["qwen2"]), tmp_path / "qwen2")
    assert "llama-quantize" in refusal(capsys, qwen, tmp_path / "a.gguf", "--type", "Q4_K_M")
    assert "ends with .gguf" in refusal(capsys, qwen, tmp_path / "a")
    assert "known are" in refusal(capsys, tiny.checkpoint("qwen2_5_vl"), tmp_path / "a.gguf")
    smol = saved(made(USUAL["smollm3"]), tmp_path / "smollm3")
    tokenizer = json.loads((smol / "tokenizer.json").read_text()) | {"pre_tokenizer": {"type": "Whitespace"}}
    settings = json.loads((smol / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (smol / "tokenizer.json").write_text(json.dumps(tokenizer))
    (smol / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "by a rule that is not written" in refusal(capsys, smol, tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*a.gguf*"))
    (tmp_path / "a.gguf").touch()
    assert "exists already" in refusal(capsys, qwen, tmp_path / "a.gguf")
    assert main(["quantize", str(qwen), str(tmp_path / "b"), "--method", "int8", "--type", "q8_0"]) == 1


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("method", ["gguf", "int4"])
def test_what_cannot_be_written_is_told_and_leaves_nothing(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(tiny.checkpoint("qwen2"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "a.gguf", tmp_path / "file" / "a.gguf"):
        with no_file_beyond(60_000):
            assert main(["quantize", source, str(out), "--method", method]) == 1
        assert f"{str(out)!r} cannot be written: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["file"]
    assert main(["quantize", source, str(tmp_path / "a.gguf"), "--method", method]) == 0


def test_wrong_options_are_told_before_weights_are_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []
    monkeypatch.setattr("beheld.tools.quantize.fetch_weights", lambda args, path: fetched.append(path))
    source, there = tiny.checkpoint("qwen2"), tmp_path / "there.gguf"
    there.touch()
    assert "ends with .gguf" in refusal(capsys, source, tmp_path / "a")
    assert "exists already" in refusal(capsys, source, there)
    assert "is not written" in refusal(capsys, source, tmp_path / "a.gguf", "--type", "q4_k_m")
    assert "calibrates by nothing" in refusal(capsys, source, tmp_path / "a.gguf", "--question", "What is it?")
    assert main(["quantize", str(source), str(there), "--method", "int4"]) == 1
    assert main(["quantize", str(source), str(tmp_path / "b"), "--method", "awq"]) == 1
    assert not fetched


def test_numbers_beyond_float16_leave_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made(USUAL["qwen2"])
    model.model.layers[2].mlp.up_proj.weight.data[3, 5] = 1e5
    source = saved(model, tmp_path / "source")
    assert "holds 100000, and f16 no more than 65504" in refusal(capsys, source, tmp_path / "a.gguf", "--type", "f16")
    assert not list(tmp_path.glob("*a.gguf*"))
    assert quantized(source, tmp_path / "a.gguf", "--type", "bf16") == 0


def test_a_few_rows_at_a_time_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(made(USUAL["qwen3moe"]), tmp_path / "source")
    assert quantized(source, tmp_path / "a.gguf", "--type", "q4_0") == 0
    monkeypatch.setattr(write_gguf, "_CHUNK", 5 * 64)
    assert main(["quantize", str(source), str(tmp_path / "b.gguf"), "--method", "gguf-readable", "--type", "q4_0"]) == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
