"""GGUF files: the vision part of Qwen2.5-VL next to its text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.gguf.projector import ProjectorFile
from beheld.families.qwen2_vl.gguf import files_with

# What the published models have: a window's side in pixels, which the file may state, and temporal positions a second.
_WINDOW = 112
_PER_SECOND = 2


def files(vision: ProjectorFile, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's files, as transformers' classes read them."""
    tower = {
        "hidden_size": vision.number("vision.embedding_length"),
        "out_hidden_size": text["hidden_size"],
        "intermediate_size": vision.number("vision.feed_forward_length"),
        "hidden_act": "silu",
        "window_size": vision.number("vision.window_size", _WINDOW),
        "fullatt_block_indexes": _whole_layers(vision),
        "tokens_per_second": _PER_SECOND,
    }
    return files_with("qwen2_5_vl", "Qwen2_5_VL", tower, vision, text)


def _whole_layers(vision: ProjectorFile) -> list[int]:
    """Return the layers without windows.

    Raises:
        ModelError: the file does not say which these are, or names some that are not there.
    """
    count = vision.number("vision.block_count")
    listed = vision.header.metadata.get("clip.vision.wa_layer_indexes")
    if listed is None:
        period = vision.number("vision.n_wa_pattern")
        return [layer for layer in range(count) if (layer + 1) % period == 0]
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < count for layer in listed):
        raise vision.refused(f"clip.vision.wa_layer_indexes is {listed!r}, and must be numbers of its {count} layers")
    return listed
