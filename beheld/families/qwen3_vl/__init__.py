"""Qwen3-VL: a tower whose features also enter the first text layers."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE_AND_VIDEO, Family, GGUFProjector, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    deeper=lambda config: len(config.vision_config.deepstack_visual_indexes),
    short_names=(
        ShortName(
            "qwen3-vl-2b",
            "Qwen/Qwen3-VL-2B-Instruct",
            "qwen3_vl",
            "Apache-2.0",
            2.1,
            "images, documents and videos on a small machine",
        ),
        ShortName(
            "qwen3-vl-4b",
            "Qwen/Qwen3-VL-4B-Instruct",
            "qwen3_vl",
            "Apache-2.0",
            4.4,
            "documents, videos, coordinates, tools",
        ),
        ShortName(
            "qwen3-vl-8b",
            "Qwen/Qwen3-VL-8B-Instruct",
            "qwen3_vl",
            "Apache-2.0",
            8.8,
            "documents, videos, coordinates, tools",
        ),
        ShortName(
            "qwen3-vl-30b-a3b",
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            "qwen3_vl_moe",
            "Apache-2.0",
            31.1,
            "as qwen3-vl-8b; experts, so it answers fast",
            expert_billions=29.0,
        ),
    ),
    gguf_projector=GGUFProjector(
        "qwen3vl_merger",
        "gguf:files",
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "v.blk.{}.ln1": "model.visual.blocks.{}.norm1",
            "v.blk.{}.ln2": "model.visual.blocks.{}.norm2",
            "v.blk.{}.attn_qkv": "model.visual.blocks.{}.attn.qkv",
            "v.blk.{}.attn_out": "model.visual.blocks.{}.attn.proj",
            "v.blk.{}.ffn_up": "model.visual.blocks.{}.mlp.linear_fc1",
            "v.blk.{}.ffn_down": "model.visual.blocks.{}.mlp.linear_fc2",
            "v.deepstack.{}.norm": "model.visual.deepstack_merger_list.{}.norm",
            "v.deepstack.{}.fc1": "model.visual.deepstack_merger_list.{}.linear_fc1",
            "v.deepstack.{}.fc2": "model.visual.deepstack_merger_list.{}.linear_fc2",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        "model.language_model.",
        listed={"v.deepstack.": "clip.vision.is_deepstack_layers"},
        stacked={"v.patch_embd": 2},
    ),
    tested=(
        KnownCheckpoint(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            "Qwen/Qwen3-VL-4B-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions; the tower also enters the first layers",
            on_gpu=True,
        ),
        KnownCheckpoint(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            IMAGE_AND_VIDEO,
            "as Qwen3-VL; experts",
        ),
    ),
    calls=("hermes",),
    reasoning=("think",),
    grounding=Grounding("json", 1000),
)
