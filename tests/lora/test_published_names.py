"""Adapters with the names of a checkpoint's own layout answer as the checkpoint with the adapter merged into it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beheld import LLM, LoRARequest, SamplingParams
from beheld.core.errors import LoRAError
from tests import tiny
from tests.oracle import cases
from tests.oracle.test_oracle import request

# Family -> what the names of its decoder's layers begin with in its files.
DECODERS = {
    "internvl_chat": "language_model.model.layers",
    "internvl_chat_qwen2": "language_model.model.layers",
    "interns1": "model.language_model.layers",
    "h2ovl_chat": "language_model.model.layers",
    "nvlm_d": "language_model.model.layers",
    "bee": "model.language_model.layers",
    "deepseek_ocr": "model.layers",
    "deepseek_vl_v2": "language.model.layers",
    "deepseek_vl_v2_small": "language.model.layers",
    "dots_ocr": "model.layers",
    "glm4v_9b": "transformer.encoder.layers",
    "hyperclovax_vlm": "language_model.model.layers",
    "minicpmv": "llm.model.layers",
    "minicpmv_2_0": "llm.model.layers",
    "minicpmo": "llm.model.layers",
    "molmo": "model.transformer.blocks",
    "phi3_v": "model.layers",
    "qwen_vl": "transformer.h",
    "qwen_vl_chat": "transformer.h",
    "ultravox": "model.layers",
}
# What stands before these names in the whole model, where the decoder comes from a repository of its own.
WHOLE = {"ultravox": "language_model."}
RANK, ALPHA = 4, 8


def adapter(family: str) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer, random matrices (r, I) and (O, r) of all its linear layers.

    Left out are experts and what chooses them, and the expansion of latents, which attention takes apart.
    """
    own = re.compile(re.escape(DECODERS[family]) + r"\.\d+\.(?!.*(experts|mlp\.gate\.|kv_b_proj)).*\.weight")
    weights = {
        name: weight
        for file in sorted(tiny.checkpoint(family).rglob("*.safetensors"))
        for name, weight in load_file(file).items()
        if own.fullmatch(name) and weight.dim() == 2
    }
    generator = torch.Generator().manual_seed(3)
    return {
        name.removesuffix(".weight"): (
            0.3 * torch.randn(RANK, weight.shape[1], generator=generator),
            0.3 * torch.randn(weight.shape[0], RANK, generator=generator),
        )
        for name, weight in sorted(weights.items())
    }


def write(folder: Path, matrices: dict[str, tuple[Tensor, Tensor]], whole: str = "") -> str:
    """Write an adapter as peft does; `whole` stands before the names of layers."""
    folder.mkdir()
    tensors = {}
    for path, (down, up) in matrices.items():
        place = f"base_model.model.{whole}{path}"
        tensors |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    config["target_modules"] = sorted({path.rpartition(".")[2] for path in matrices})
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def merged(family: str, folder: Path, matrices: dict[str, tuple[Tensor, Tensor]]) -> Path:
    """Write the checkpoint with the adapter in its weights."""
    shutil.copytree(tiny.checkpoint(family), folder)
    for file in folder.rglob("*.safetensors"):
        weights = load_file(file)
        for path, (down, up) in matrices.items():
            name = f"{path}.weight"
            if name in weights:
                weights[name] = weights[name].float() + ALPHA / RANK * up @ down
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def answers(folder: Path, family: str, lora: LoRARequest | None = None, **options: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    about = cases.SHORT_SOUND if family == "ultravox" else cases.ONE
    with LLM(str(folder), dtype="float32", seed=0, **cases.options(family, "roomy") | options) as llm:
        prompts = [request(family, ask) for ask in (about, cases.SHORT)]
        found = [output.outputs[0] for output in llm.generate(prompts, params, lora_request=lora, use_tqdm=False)]
        if lora is not None:
            plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            assert plain != [one.token_ids for one in found], "an adapter that changes nothing proves nothing"
        return found


@pytest.mark.parametrize("family", DECODERS)
def test_an_adapter_answers_as_what_it_is_merged_into(family: str, tmp_path: Path) -> None:
    matrices = adapter(family)
    assert len(matrices) >= 6
    lora = LoRARequest("own", 1, write(tmp_path / "adapter", matrices, WHOLE.get(family, "")))
    options = {"enable_lora": True, "max_lora_rank": RANK}
    found = answers(tiny.checkpoint(family), family, lora, **options)
    wanted = answers(merged(family, tmp_path / "merged", matrices), family)
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        said = [
            [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in (one, other)
        ]
        assert said[0] == pytest.approx(said[1], abs=5e-4)


def test_matrices_of_other_sizes_are_refused(tmp_path: Path) -> None:
    """Fused layers are split by rules that check nothing."""
    matrices = adapter("qwen_vl")
    path = next(path for path in matrices if path.endswith("c_attn"))
    down, up = matrices[path]
    lora = LoRARequest("own", 1, write(tmp_path / "adapter", {path: (down, up[:-1].clone())}))
    with pytest.raises(LoRAError):
        answers(tiny.checkpoint("qwen_vl"), "qwen_vl", lora, enable_lora=True, max_lora_rank=RANK)
