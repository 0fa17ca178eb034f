"""Qwen2.5-VL: a tower with windows."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE_AND_VIDEO, Family, GGUFProjector, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("qwen2_5_vl",),
    short_names=(
        ShortName(
            "qwen2.5-vl-3b",
            "Qwen/Qwen2.5-VL-3B-Instruct",
            "qwen2_5_vl",
            "Qwen Research License",
            3.8,
            "documents, charts, videos, coordinates",
        ),
        ShortName(
            "qwen2.5-vl-7b",
            "Qwen/Qwen2.5-VL-7B-Instruct",
            "qwen2_5_vl",
            "Apache-2.0",
            8.3,
            "documents, charts, videos, coordinates",
        ),
        ShortName(
            "qwen2.5-vl-32b",
            "Qwen/Qwen2.5-VL-32B-Instruct",
            "qwen2_5_vl",
            "Apache-2.0",
            33.5,
            "documents, charts, videos, mathematics",
        ),
    ),
    gguf_projector=GGUFProjector(
        "qwen2.5vl_merger",
        "gguf:files",
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.post_ln": "model.visual.merger.ln_q",
            "v.blk.{}.ln1": "model.visual.blocks.{}.norm1",
            "v.blk.{}.ln2": "model.visual.blocks.{}.norm2",
            "v.blk.{}.attn_qkv": "model.visual.blocks.{}.attn.qkv",
            "v.blk.{}.attn_q": "model.visual.blocks.{}.attn.qkv",
            "v.blk.{}.attn_k": "model.visual.blocks.{}.attn.qkv",
            "v.blk.{}.attn_v": "model.visual.blocks.{}.attn.qkv",
            "v.blk.{}.attn_out": "model.visual.blocks.{}.attn.proj",
            "v.blk.{}.ffn_gate": "model.visual.blocks.{}.mlp.gate_proj",
            "v.blk.{}.ffn_up": "model.visual.blocks.{}.mlp.up_proj",
            "v.blk.{}.ffn_down": "model.visual.blocks.{}.mlp.down_proj",
            "mm.0": "model.visual.merger.mlp.0",
            "mm.2": "model.visual.merger.mlp.2",
        },
        "model.language_model.",
        stacked={"v.patch_embd": 2},
    ),
    tested=(
        KnownCheckpoint(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen/Qwen2.5-VL-3B-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions",
            on_gpu=True,
        ),
    ),
    calls=("hermes",),
    reasoning=("think",),
    grounding=Grounding("json", 0),
)
