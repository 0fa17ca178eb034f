"""Phi-4-multimodal: pictures are numbered in a prompt, `<|image_1|>`, by those who know the published code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.resolve import CONFIG, read_json
from beheld.core.errors import PromptError
from beheld.inputs.families import Family, Place

_NUMBERED = re.compile(r"<\|image_(\d+)\|>")


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one picture; older versions do not say how its marker is replaced. See families.Call."""
    outputs = processor.image_processor([item], **options)
    return outputs, processor.image_token * int(outputs["num_img_tokens"][0])


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | Place, ...]:
    """The pieces of a text with numbered pictures; any other text as it is.

    Raises:
        PromptError: the numbers are not 1, 2, ... in this order.
    """
    found = _NUMBERED.findall(text)
    if not found:
        return text
    if found != [str(number) for number in range(1, 1 + len(found))]:
        raise PromptError("The pictures' numbers are not 1, 2, ... in order.", "Write <|image_1|>, then <|image_2|>.")
    pieces: list[str | Place] = []
    for index, part in enumerate(_NUMBERED.split(text)):
        pieces.append(Place("image") if index % 2 else part)
    return tuple(piece for piece in pieces if piece)


def load(path: Path) -> Any:
    """The processor of a checkpoint; that of the main revision has code of its own for what transformers has too.

    Its tokenizer does not say which of its tokens are the markers; the configuration does.
    """
    from transformers import (
        AutoProcessor,
        AutoTokenizer,
        Phi4MultimodalFeatureExtractor,
        Phi4MultimodalImageProcessor,
        Phi4MultimodalProcessor,
    )

    ours = own_config(read_json(path / CONFIG))
    if not ours:
        return AutoProcessor.from_pretrained(str(path))
    tokenizer = AutoTokenizer.from_pretrained(str(path), **ours)
    config = ours["config"]
    for name, index in (
        ("image_token", config.vision_config.image_token_id),
        ("audio_token", config.audio_config.audio_token_id),
    ):
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
        setattr(tokenizer, f"{name}_id", index)
    return Phi4MultimodalProcessor(
        Phi4MultimodalImageProcessor.from_pretrained(str(path)),
        Phi4MultimodalFeatureExtractor.from_pretrained(str(path)),
        tokenizer,
    )


FAMILY = Family(call=call, load=load, rewrite=rewrite, host_only=frozenset(("num_img_tokens",)))
