"""Phi-3-vision's configuration: Phi-3's and the settings of the image embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CLIPVisionConfig, Phi3Config

from beheld.core.errors import ModelError
from beheld.families._shared.config import CLIP_L_336

# The tower's sizes are in the repository's code, not in its configuration; a smaller checkpoint's `vision_config`
# overrides them.
_TOWER = {**CLIP_L_336, "projection_dim": 768}
# Entry of config.json -> its settings, with the one value that is supported and the repository's default.
_SUPPORTED: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "embd_layer": {
        "embedding_cls": ("image", None),
        "hd_transform_order": ("sub_glb", "glb_sub"),
        "projection_cls": ("mlp", "linear"),
        "use_hd_transform": (True, False),
        "with_learnable_separator": (True, False),
    },
    "img_processor": {
        "model_name": ("openai/clip-vit-large-patch14-336", None),
        "name": ("clip_vision_model", None),
        "type_feature": ("patch", "patch"),
    },
}
_OTHER = "Use a checkpoint of the layout of microsoft/Phi-3.5-vision-instruct."


class Phi3VConfig(Phi3Config):
    """config.json as published.

    Attributes:
        embd_layer, img_processor: settings of the image embedding.
        vision_config: the tower; CLIP-L/336 unless config.json has the entry.
        image_token_id: the token `<|image|>`, whose id is in the repository's code.
    """

    model_type = "phi3_v"
    sub_configs = {"vision_config": CLIPVisionConfig}  # noqa: RUF012
    embd_layer: Any = None
    img_processor: Any = None
    vision_config: Any = None
    image_token_id: int = 32044

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the image settings and make the tower's configuration.

        Raises:
            ModelError: a setting has an unsupported value; it is named.
        """
        for entry, settings in _SUPPORTED.items():
            given = getattr(self, entry)
            # transformers makes a configuration without arguments to learn its defaults.
            for name, (supported, default) in settings.items() if isinstance(given, Mapping) else ():
                value = given.get(name, default)
                if value != supported:
                    raise ModelError(f"{entry}.{name} {value!r} in config.json is not {supported!r}.", _OTHER)
        scaling = kwargs.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in (None, "su", "longrope", "default"):
            raise ModelError(f"rope_scaling.type {kind!r} in config.json is not 'su'.", _OTHER)
        if self.sliding_window is not None and self.sliding_window >= self.max_position_embeddings:
            # No sequence is that long, and layers without a window share their blocks more freely.
            self.sliding_window = None
        if not isinstance(self.vision_config, CLIPVisionConfig):
            self.vision_config = CLIPVisionConfig(**{**_TOWER, **(self.vision_config or {})})
        super().__post_init__(**kwargs)

    @property
    def num_tower_layers(self) -> int:
        """Return the number of the tower's layers before the features: an index into its hidden states."""
        index = int((self.img_processor or {}).get("layer_idx", -2))
        return index if index >= 0 else self.vision_config.num_hidden_layers + 1 + index
