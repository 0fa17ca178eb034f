"""Sizes of a tower that several families have."""

from __future__ import annotations

# The sizes of openai/clip-vit-large-patch14-336, which the code of several repositories holds in place of their
# configuration.
CLIP_L_336 = {
    "hidden_act": "quick_gelu",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
