"""LLaVA-1.5: images before a language model."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, GGUFProjector, KnownCheckpoint

FAMILY = Family(
    model_types=("llava",),
    gguf_projector=GGUFProjector(
        "mlp",
        "gguf:files",
        {
            "v.class_embd": "model.vision_tower.embeddings.class_embedding",
            "v.pre_ln": "model.vision_tower.pre_layrnorm",
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
            "mm.0": "model.multi_modal_projector.linear_1",
            "mm.2": "model.multi_modal_projector.linear_2",
        },
        "model.language_model.",
        stand_ins={"model.vision_tower.post_layernorm": "model.vision_tower.pre_layrnorm"},
    ),
    tested=(
        KnownCheckpoint(
            "llava",
            "LlavaForConditionalGeneration",
            "llava-hf/llava-1.5-7b-hf",
            IMAGE,
            on_gpu=True,
        ),
    ),
)
