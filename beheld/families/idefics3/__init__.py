"""Idefics 3: images in tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, GGUFProjector, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("idefics3",),
    short_names=(
        ShortName(
            "smolvlm-256m",
            "HuggingFaceTB/SmolVLM-256M-Instruct",
            "idefics3",
            "Apache-2.0",
            0.26,
            "short descriptions and questions on a laptop",
        ),
        ShortName(
            "smolvlm-500m",
            "HuggingFaceTB/SmolVLM-500M-Instruct",
            "idefics3",
            "Apache-2.0",
            0.51,
            "short descriptions and questions on a laptop",
        ),
    ),
    gguf_projector=GGUFProjector(
        "idefics3",
        "gguf:files",
        {
            "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
            "v.position_embd": "model.vision_model.embeddings.position_embedding",
            "v.post_ln": "model.vision_model.post_layernorm",
            "v.blk.{}.ln1": "model.vision_model.encoder.layers.{}.layer_norm1",
            "v.blk.{}.ln2": "model.vision_model.encoder.layers.{}.layer_norm2",
            "v.blk.{}.attn_q": "model.vision_model.encoder.layers.{}.self_attn.q_proj",
            "v.blk.{}.attn_k": "model.vision_model.encoder.layers.{}.self_attn.k_proj",
            "v.blk.{}.attn_v": "model.vision_model.encoder.layers.{}.self_attn.v_proj",
            "v.blk.{}.attn_out": "model.vision_model.encoder.layers.{}.self_attn.out_proj",
            "v.blk.{}.ffn_up": "model.vision_model.encoder.layers.{}.mlp.fc1",
            "v.blk.{}.ffn_down": "model.vision_model.encoder.layers.{}.mlp.fc2",
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        "model.text_model.",
    ),
    tested=(
        KnownCheckpoint(
            "idefics3", "Idefics3ForConditionalGeneration", "HuggingFaceM4/Idefics3-8B-Llama3", IMAGE, "tiles"
        ),
    ),
)
