"""Gemma 3: attention within an image runs both ways."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, GGUFProjector, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("gemma3",),
    short_names=(
        ShortName(
            "gemma3-4b", "google/gemma-3-4b-it", "gemma3", "Gemma Terms of Use (gated)", 4.3, "images in many languages"
        ),
        ShortName(
            "gemma3-12b",
            "google/gemma-3-12b-it",
            "gemma3",
            "Gemma Terms of Use (gated)",
            12.2,
            "images in many languages",
        ),
        ShortName(
            "gemma3-27b",
            "google/gemma-3-27b-it",
            "gemma3",
            "Gemma Terms of Use (gated)",
            27.4,
            "images in many languages",
        ),
    ),
    gguf_projector=GGUFProjector(
        "gemma3",
        "gguf:files",
        {
            "v.patch_embd": "model.vision_tower.embeddings.patch_embedding",
            "v.position_embd": "model.vision_tower.embeddings.position_embedding",
            "v.post_ln": "model.vision_tower.post_layernorm",
            "v.blk.{}.ln1": "model.vision_tower.encoder.layers.{}.layer_norm1",
            "v.blk.{}.ln2": "model.vision_tower.encoder.layers.{}.layer_norm2",
            "v.blk.{}.attn_q": "model.vision_tower.encoder.layers.{}.self_attn.q_proj",
            "v.blk.{}.attn_k": "model.vision_tower.encoder.layers.{}.self_attn.k_proj",
            "v.blk.{}.attn_v": "model.vision_tower.encoder.layers.{}.self_attn.v_proj",
            "v.blk.{}.attn_out": "model.vision_tower.encoder.layers.{}.self_attn.out_proj",
            "v.blk.{}.ffn_up": "model.vision_tower.encoder.layers.{}.mlp.fc1",
            "v.blk.{}.ffn_down": "model.vision_tower.encoder.layers.{}.mlp.fc2",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
        },
        "model.language_model.",
        plus_one=("mm.soft_emb_norm",),
    ),
    tested=(
        KnownCheckpoint(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            "google/gemma-3-4b-it",
            IMAGE,
            "each image is read both ways, in one step",
            on_gpu=True,
        ),
    ),
    both_ways="media",
    calls=("pythonic",),
)
