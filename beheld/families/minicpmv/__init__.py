"""MiniCPM-V: slices of an image, each resampled to 64 embeddings, before a text model that its version chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.family import IMAGE, IMAGE_AND_VIDEO, Definition, Family, KnownCheckpoint

# Of Llama 3's tokenizer: the published code of 2.5 ends answers at <|eot_id|>, too.
_END_OF_TEXT, _END_OF_TURN = 128001, 128009


def _placeholders(config: Any) -> dict[str, int]:
    """Return the id of `<unk>` for what the version takes."""
    kinds = IMAGE_AND_VIDEO if config.facts.videos else IMAGE
    return dict.fromkeys(kinds, config.image_token_id)


def _ends(config: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    return (_END_OF_TURN,) if config.eos_token_id == _END_OF_TEXT else ()


FAMILY = Family(
    model_types=("minicpmv",),
    architectures=("MiniCPMV",),
    tested=(
        KnownCheckpoint(
            "minicpmv",
            "MiniCPMV",
            "openbmb/MiniCPM-V-2_6",
            IMAGE_AND_VIDEO,
            "version 2.6; a version that is not in this table is refused",
        ),
        KnownCheckpoint(
            "minicpmv_2_0",
            "MiniCPMV",
            "openbmb/MiniCPM-V-2",
            IMAGE,
            "version 2.0, which config.json does not name; an image ends with a line break",
        ),
        KnownCheckpoint(
            "minicpmv_2_5",
            "MiniCPMV",
            "openbmb/MiniCPM-Llama3-V-2_5",
            IMAGE,
            "version 2.5; the slices of an image are filled up to the largest, which the others see, as in the "
            "published code",
        ),
        KnownCheckpoint(
            "minicpmv_4_0",
            "MiniCPMV",
            "openbmb/MiniCPM-V-4",
            IMAGE_AND_VIDEO,
            "version 4.0",
        ),
        KnownCheckpoint(
            "minicpmv_4_5",
            "MiniCPMV",
            "openbmb/MiniCPM-V-4_5",
            IMAGE_AND_VIDEO,
            "version 4.5; each frame has embeddings of its own, as without temporal_ids in the published code",
        ),
    ),
    placeholder_tokens={"image": "<unk>"},
    placeholders=_placeholders,
    definition=Definition(config="config:MiniCPMVConfig", model="modeling:MiniCPMVForConditionalGeneration"),
    ends=_ends,
    calls=("hermes",),
    reasoning=("think",),
)
