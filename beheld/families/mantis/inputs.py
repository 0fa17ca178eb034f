"""Mantis: LLaVA's model with images numbered in words: `(image 1: <Image>` before each, `</Image>)` after it.

Its processor is in a separate package; this text is all that it adds to LLaVA's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.families.inputs import FamilyInputs


def load(path: Path) -> Any:
    """LLaVA's processor with the tower settings from the checkpoint's configuration."""
    from transformers import AutoConfig, LlavaProcessor

    config = AutoConfig.from_pretrained(str(path))
    return LlavaProcessor.from_pretrained(
        str(path),
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image, whose number is its setting; see families.inputs.Call."""
    outputs, texts = processor._process_images([item], **options)
    return outputs, f"(image {setting}: <Image>{texts[0]}</Image>)"


INPUTS = FamilyInputs(
    call=call,
    numbered=frozenset(("image",)),
    load=load,
    embedded={"image": ("(image {setting}: <Image>", "</Image>)")},
)
