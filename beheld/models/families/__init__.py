"""Families with a quirk that transformers' seams do not carry, one small file each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from beheld.attention.cross import CrossView
from beheld.checkpoint.convert import converted
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.plan import EncodeItem, SpanView

# One tower call: modality (or "embeds" for embeddings given as input), indices of its items, keyword arguments.
TowerCall = tuple[str, list[int], dict[str, Any]]
CombineRule = Callable[[Sequence[EncodeItem]], list[TowerCall]]

_COMBINE = {
    "llava_next": "anyres",
    "llava_onevision": "anyres",
    "llava_next_video": "anyres",
    "molmo2": "molmo2",
    "phi4_multimodal": "phi4_multimodal",
    "qwen2_5_omni_thinker": "qwen_omni",
}


# Families whose sound no method of the model's own gives, or not alone: file with `audio_features(model, **features)`.
_EARS = {
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "phi4_multimodal": "phi4_multimodal",
    "qwen2_audio": "qwen2_audio",
}
# Families whose pictures no method of the model's own gives: file with `image_features(model, **features)`.
_EYES = {"phi4_multimodal": "phi4_multimodal"}
# Families whose head has no logits_to_keep, and is one matrix over the last hidden states.
PLAIN_HEADS = frozenset({"qwen2_audio", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"})
_WIDE = {
    "ernie4_5_vl_moe": "ernie4_5_vl_moe",
    "gemma3n": "per_layer",
    "gemma4": "per_layer",
    "qwen3_omni_moe_thinker": "deepstack",
    "qwen3_vl": "deepstack",
    "qwen3_vl_moe": "deepstack",
}
# Families whose modules are replaced or settled at load, see `adapt`.
_ADAPTED = {
    "chameleon": "chameleon",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe",
    "florence2": "florence2",
    "gemma3n": "gemma3n",
    "glm46v": "glm4v",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "lfm2": "lfm2",
    "lfm2_vl": "lfm2",
    "llama4": "llama4",
    "llava_next": "anyres",
    "llava_next_video": "anyres",
    "llava_onevision": "anyres",
    "mllama": "mllama",
    "phi4_multimodal": "phi4_multimodal",
}
# Families whose last layers write no keys, so that a pass may have a tail; see `tail_from`.
_TAILS = {"gemma4": "gemma4"}
# Families with an older layout of weights that transformers does not convert, see `renamed_weights`.
_RENAMED = {"florence2": "florence2", "phi4_multimodal": "phi4_multimodal"}
# Families some of whose layers attend beside the text.
_BESIDE = {"florence2": "florence2", "mllama": "mllama"}
# Families whose layers are told more in every pass: file with `keywords(model, positions)`.
_KEYWORDS = {"llama4": "llama4"}
# Families whose embeddings are not what their tower calls pooled: file with `embeds(model, result)`.
_EMBEDS = {"llama4": "llama4", "molmo2": "molmo2"}


class Wide(Protocol):
    """What a family's layers take beside embeddings: `width` further columns of the same rows.

    T tokens, E embeddings of one tower call, S positions whose logits are wanted, H hidden size, W `width`.
    """

    width: int

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """The further columns (T, W) of text tokens; None if they are zero."""

    def of_media(self, result: Any) -> Tensor | None:
        """The further columns (E, at most W) of what a tower returned; None to leave those of the tokens."""

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """The further columns (E, at most W) of embeddings that came in place of media; None as above."""

    def forward(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor, wanted_S: Tensor) -> Tensor:
        """As ModelAdapter.forward; `positions` in the model's own form."""


class Beside(Protocol):
    """A family some of whose layers attend beside the text."""

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """As ModelAdapter.encode."""

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """As ModelAdapter.cross_views."""

    def forward(self, embeds_TH: Tensor, positions: Tensor, wanted_S: Tensor) -> Tensor:
        """As ModelAdapter.forward; `positions` in the model's own form."""


def beside_of(model_type: str, model: Any) -> Beside | None:
    """What stands beside the text of this family, if anything does."""
    name = _BESIDE.get(model_type)
    if name is None:
        return None
    found: Beside = importlib.import_module(f"beheld.models.families.{name}").beside(model)
    return found


def wide_of(model_type: str, model: Any) -> Wide | None:
    """The family's further columns, if it has any."""
    name = _WIDE.get(model_type)
    if name is None:
        return None
    module = importlib.import_module(f"beheld.models.families.{name}")
    wide: Wide | None = module.wide(model)
    return wide


def ears_of(model_type: str) -> Callable[..., Tensor] | None:
    """What makes embeddings (sum of E, H) of sounds from the model and their features, in families that need it."""
    name = _EARS.get(model_type)
    if name is None:
        return None
    module = importlib.import_module(f"beheld.models.families.{name}")
    features: Callable[..., Tensor] = module.audio_features
    return features


def eyes_of(model_type: str) -> Callable[..., Tensor] | None:
    """What makes embeddings (sum of E, H) of pictures from the model and their features, in families that need it."""
    name = _EYES.get(model_type)
    if name is None:
        return None
    features: Callable[..., Tensor] = importlib.import_module(f"beheld.models.families.{name}").image_features
    return features


def adapt(model_type: str, model: Any) -> None:
    """Replace what in a loaded model cannot compute a batch as the engine lays it out, or cannot be captured."""
    name = _ADAPTED.get(model_type)
    if name is not None:
        importlib.import_module(f"beheld.models.families.{name}").adapt(model)


def tail_from(model_type: str, model: Any) -> int | None:
    """Make the layers that write no keys able to take a pass's tail; returns the first of them, None if there are none.

    On a GPU, where layers are compiled and steps are graphs, all tokens go through all layers.
    """
    name = _TAILS.get(model_type)
    if name is None or next(model.parameters()).device.type != "cpu":
        return None
    first: int | None = importlib.import_module(f"beheld.models.families.{name}").tail_from(model)
    return first


def keywords_of(model_type: str) -> Callable[[Any, Tensor], dict[str, Any]] | None:
    """What makes further keyword arguments of a pass, for all layers, of the model and the step's positions."""
    name = _KEYWORDS.get(model_type)
    if name is None:
        return None
    keywords: Callable[[Any, Tensor], dict[str, Any]] = importlib.import_module(
        f"beheld.models.families.{name}"
    ).keywords
    return keywords


def embeds_of(model_type: str) -> Callable[[Any, Any], Any]:
    """What makes embeddings of the model and a tower's result: a tensor (..., H), or one for each item."""
    name = _EMBEDS.get(model_type)
    if name is None:
        return _pooled
    embeds: Callable[[Any, Any], Any] = importlib.import_module(f"beheld.models.families.{name}").embeds
    return embeds


def _pooled(model: Any, result: Any) -> Any:
    # A family without a tower only maps patches to embeddings, which nothing pools.
    return result.last_hidden_state if result.pooler_output is None else result.pooler_output


def renamed_weights(model_type: str, path: Path) -> dict[str, Tensor] | None:
    """Weights under transformers' names, of families whose older layout transformers does not know; None for others.

    All of them are read at once.
    """
    name = _RENAMED.get(model_type)
    files = sorted(path.glob("*.safetensors"))
    # The names are as old as the configuration; weights of the newer layout are not read here at all.
    if name is None or not files or converted(read_json(path / CONFIG)) is None:
        return None
    from safetensors.torch import load_file

    weights = {key: tensor for file in files for key, tensor in load_file(file).items()}
    found: dict[str, Tensor] | None = importlib.import_module(f"beheld.models.families.{name}").renamed(weights)
    return found


def combine_rule(model_type: str) -> CombineRule:
    """How items of this family share a tower call."""
    name = _COMBINE.get(model_type, "plain")
    module = importlib.import_module(f"beheld.models.families.{name}")
    rule: CombineRule = module.combine
    return rule
