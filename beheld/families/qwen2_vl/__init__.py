"""Qwen2-VL: three-axis positions.

jina-reranker-m0 is one with a head of two layers: what it gives at a last token of its own, less 2.65, is the logit.
"""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.core.pooling import PoolerInfo
from beheld.families.family import IMAGE_AND_VIDEO, Family, GGUFProjector, KnownCheckpoint, ShortName

_RERANKER = PoolerInfo(
    task="classify",
    activation="sigmoid",
    width=1,
    scores="head",
    labels=("0",),
    logit_mean=2.65,
    last_id=100,
    pair_template="template_jina_reranker.jinja",
)
FAMILY = Family(
    model_types=("qwen2_vl",),
    short_names=(
        ShortName(
            "qwen2-vl-2b", "Qwen/Qwen2-VL-2B-Instruct", "qwen2_vl", "Apache-2.0", 2.2, "images and videos, documents"
        ),
    ),
    gguf_projector=GGUFProjector(
        "qwen2vl_merger",
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
            "v.blk.{}.ffn_up": "model.visual.blocks.{}.mlp.fc1",
            "v.blk.{}.ffn_down": "model.visual.blocks.{}.mlp.fc2",
            "mm.0": "model.visual.merger.mlp.0",
            "mm.2": "model.visual.merger.mlp.2",
        },
        "model.language_model.",
        stacked={"v.patch_embd": 2},
    ),
    tested=(
        KnownCheckpoint(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            "Qwen/Qwen2-VL-7B-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions",
        ),
    ),
    headed={"JinaVLForRanking": _RERANKER},
    calls=("hermes",),
    grounding=Grounding("object_ref box", 1000),
)
