"""Published models that transformers has no class for, and beheld has no definition of yet: refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ModelError


@dataclass(frozen=True)
class Missing:
    """A definition that is not there yet.

    Attributes:
        name: the class that vLLM has for it, which scripts name in hf_overrides.
        example: a public checkpoint of it.
        needs: what its definition would hold.
        also: a checkpoint of the same class that documents name for another use; empty if there is none.
        sees_by: the entry of config.json that text models of the same model type lack; empty if there are none.
    """

    name: str
    example: str
    needs: str
    also: str = ""
    sees_by: str = ""


MISSING: Mapping[str, Missing] = {
    "NVLM_D": Missing("NVLM_D", "nvidia/NVLM-D-72B", "InternViT-6B, a projector of its own, tagged tiles, Qwen2"),
    "bee": Missing("BeeForConditionalGeneration", "Open-Bee/Bee-8B-RL", "a projector between SigLIP and Qwen3"),
    "chatglm": Missing(
        "GLM4VForCausalLM",
        "zai-org/glm-4v-9b",
        "an EVA2-CLIP tower; pictures at one position",
        sees_by="vision_config",
    ),
    # Published under the model type of DeepSeek-VL2, whose class it is not.
    "deepseek_ocr": Missing(
        "DeepseekOCRForCausalLM", "deepseek-ai/DeepSeek-OCR", "SAM and CLIP towers in a row, a projector, experts"
    ),
    "deepseek_vl_v2": Missing(
        "DeepseekVLV2ForCausalLM", "deepseek-ai/deepseek-vl2-tiny", "a processor of tiles, a projector, experts"
    ),
    "dots_ocr": Missing("DotsOCRForCausalLM", "rednote-hilab/dots.ocr", "a tower of its own before Qwen2"),
    "h2ovl_chat": Missing("H2OVLChatModel", "h2oai/h2ovl-mississippi-800m", "InternViT, tiles in two passes"),
    "hyperclovax_vlm": Missing(
        "HCXVisionForCausalLM", "naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B", "an abstractor behind SigLIP"
    ),
    "interns1": Missing("InternS1ForConditionalGeneration", "internlm/Intern-S1-mini", "InternVL's layout over Qwen3"),
    "internvl_chat": Missing("InternVLChatModel", "OpenGVLab/InternVL2-2B", "the original key names and processor"),
    "minicpmo": Missing("MiniCPMO", "openbmb/MiniCPM-o-2_6", "MiniCPM-V's resampler, and a Whisper encoder"),
    "minicpmv": Missing("MiniCPMV", "openbmb/MiniCPM-V-2_6", "a resampler with two-axis positions, sliced pictures"),
    "molmo": Missing("MolmoForCausalLM", "allenai/Molmo-7B-D-0924", "overlapping tiles, pooled by attention"),
    "phi3_v": Missing(
        "Phi3VForCausalLM",
        "microsoft/Phi-3.5-vision-instruct",
        "CLIP tiles with line marks, Phi-3; for VLM2Vec an embedding in place of an answer, and its own template",
        also="TIGER-Lab/VLM2Vec-Full",
    ),
    "qwen": Missing(
        "QwenVLForConditionalGeneration",
        "Qwen/Qwen-VL",
        "Qwen-1, a ViT-bigG tower and its resampler",
        sees_by="visual",
    ),
    "ultravox": Missing("UltravoxModel", "fixie-ai/ultravox-v0_5-llama-3_2-1b", "a Whisper encoder before Llama"),
}
"""Model type in config.json -> what is missing."""


def refuse(config: Mapping[str, Any]) -> None:
    """Raise ModelError if `config` (the content of config.json) is of a model whose definition is missing."""
    kind, named = config.get("model_type"), config.get("architectures") or ()
    # The class says more than the type, which some share.
    for known, missing in sorted(MISSING.items(), key=lambda row: row[1].name not in named):
        if kind != known and missing.name not in named:
            continue
        if missing.sees_by and missing.sees_by not in config and named and missing.name not in named:
            raise ModelError(
                f"There is no definition of {named[0]} (model type {kind!r}), which reads text alone, neither in "
                "transformers nor in beheld.",
                "`beheld models` lists the families that run.",
            )
        raise ModelError(
            f"There is no definition of {missing.name} (model type {kind!r}) yet, neither in "
            f"transformers nor in beheld. It needs: {missing.needs}.",
            "`beheld models` lists the families that run.",
        )


def markdown() -> list[str]:
    """The lines of docs/models.md about them."""
    return [
        "",
        "## What has no definition yet",
        "",
        "transformers has no class for these, and neither has beheld.",
        "",
        "| model type | vLLM's class | for example | needs |",
        "|---|---|---|---|",
        *(f"| {kind} | {row.name} | {_examples(row)} | {row.needs} |" for kind, row in sorted(MISSING.items())),
    ]


def _examples(row: Missing) -> str:
    return f"{row.example}, {row.also}" if row.also else row.example
