"""GGUF files of further text models, written as llama.cpp's converter does, answer as transformers' models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize
from transformers import AutoTokenizer

from tests import tiny
from tests.quant.test_gguf import PROMPTS, answers, reference
from tests.tiny_gguf import _add, _tokenizer, permuted


class Case(NamedTuple):
    """A family.

    Attributes:
        architecture: the file's name of it.
        kind: begins the names of transformers' classes.
        options: of transformers' configuration, beside SIZES.
        said: metadata, beside the usual.
        names: of a layer's parts, beside the usual.
    """

    architecture: str
    kind: str
    options: dict[str, Any]
    said: dict[str, Any]
    names: dict[str, str]


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
USUAL = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SAID_OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
CASES = {
    "gemma3": Case(
        "gemma3",
        "Gemma3",
        {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
        {"attention.sliding_window": 12, "attention.key_length": 32, "attention.value_length": 32},
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
    "phi3": Case(
        "phi3",
        "Phi3",
        {"sliding_window": 12, "pad_token_id": 0},
        {"attention.sliding_window": 12, "rope.dimension_count": 16, "rope.scaling.original_context_length": 256},
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    # Phi-4 says by 0 that no layer has a window.
    "phi4": Case(
        "phi3",
        "Phi3",
        {"sliding_window": None, "pad_token_id": 0},
        {"attention.sliding_window": 0, "rope.dimension_count": 16, "rope.scaling.original_context_length": 256},
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    "smollm3": Case("smollm3", "SmolLM3", {"use_sliding_window": False, "pad_token_id": 0}, {}, {}),
    "qwen3moe": Case(
        "qwen3moe",
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
        {**SAID_OF_EXPERTS, "attention.key_length": 16, "attention.value_length": 16},
        {"mlp.gate": "ffn_gate_inp"},
    ),
    "qwen2moe": Case(
        "qwen2moe",
        "Qwen2Moe",
        {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 96},
        {**SAID_OF_EXPERTS, "expert_shared_feed_forward_length": 96},
        {
            "mlp.gate": "ffn_gate_inp",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
            "mlp.shared_expert.up_proj": "ffn_up_shexp",
            "mlp.shared_expert.down_proj": "ffn_down_shexp",
        },
    ),
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))


def made(case: Case) -> Any:
    """transformers' tiny model."""
    plain = json.loads((tiny.checkpoint("qwen2") / "config.json").read_text())
    config = getattr(transformers, f"{case.kind}{'Text' if case.kind == 'Gemma3' else ''}Config")(
        **SIZES | {"vocab_size": plain["vocab_size"], "intermediate_size": 128, "max_position_embeddings": 256}
        | {"eos_token_id": plain["eos_token_id"], "initializer_range": 0.2, "tie_word_embeddings": False} | case.options
    )  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.add_(0.2 * torch.randn(parameter.shape))
    return model


def write(case: Case, model: Any, file: Path, kind: Kind) -> Path:
    """Write the model as llama.cpp's converter does."""
    config, source = model.config, tiny.checkpoint("qwen2")
    writer = GGUFWriter(file, case.architecture)
    said = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope(config)),
        **case.said,
    }
    plain = json.loads((source / "config.json").read_text())
    for name, value in {f"{case.architecture}.{k}": v for k, v in said.items()}.items():
        _add(writer, name, value)
    for name, value in _tokenizer(source, plain).items():
        _add(writer, name, value)
    for name, array in arrays(case, model).items():
        if array.ndim > 1 and kind != Kind.F32 and array.shape[-1] % 32 == 0 and "inp" not in name:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rope(config: Any) -> float:
    said = config.rope_parameters
    return float((said.get("full_attention") or said)["rope_theta"])


def arrays(case: Case, model: Any) -> dict[str, np.ndarray]:
    names, found = USUAL | case.names, {}
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        stem, suffix = name.rsplit(".", 1) if name.endswith(("weight", "bias")) else (name, "weight")
        if case.kind == "Gemma3" and stem.endswith("norm"):
            array = array + 1
        if stem in TOP:
            found[f"{TOP[stem]}.{suffix}"] = array
            continue
        layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem).groups()  # type: ignore[union-attr]
        if part == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
            found[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(up)
            continue
        if part == "mlp.experts.down_proj":
            found[f"blk.{layer}.ffn_down_exps.weight"] = array
            continue
        if case.kind == "SmolLM3" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            array = permuted(array, 4 if "q_proj" in part else 2)
        found[f"blk.{layer}.{names[part]}.{suffix}"] = array
    return found


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = made(case)
    file = write(case, model, tmp_path / "a.gguf", Kind.F32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))
    assert answers(file, PROMPTS) == reference(model, tokenizer, PROMPTS)


def test_experts_of_few_bits_answer_as_their_numbers(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    model = made(case)
    file = write(case, model, tmp_path / "a.gguf", Kind.Q8_0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "mlp.gate." not in name:
            from gguf.quants import dequantize

            parameter.data = torch.from_numpy(dequantize(quantize(parameter.data.numpy(), Kind.Q8_0), Kind.Q8_0))
    tokenizer = AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))
    assert answers(file, PROMPTS) == reference(model, tokenizer, PROMPTS)


@pytest.mark.parametrize("pattern", [0, [True, False]], ids=str)
def test_a_pattern_of_windows_that_is_no_period_is_refused(pattern: Any) -> None:
    from beheld.core.errors import ModelError
    from beheld.families.gemma3_text.gguf import config

    made = {"sliding_window": 12, "num_hidden_layers": 2}
    with pytest.raises(ModelError, match="sliding_window_pattern as"):
        config(made, {"attention.sliding_window_pattern": pattern})
