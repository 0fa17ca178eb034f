"""Phi-4-multimodal: prompts number images and audio as in the published code, for example `<|image_1|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ProcessError, PromptError
from beheld.core.speech import SpeechForm
from beheld.families.inputs import WITH_OTHER_KIND, EffectiveSize, FamilyInputs, ItemPlace, ProcessedItem
from beheld.inputs.media.effective_size import numbers, padded_over_tiles

_NUMBERED = re.compile(r"<\|(image|audio)_(\d+)\|>")
_NOUNS = {"image": "images", "audio": "audio items"}


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or audio item; older versions do not report the placeholder's replacement.

    See families.inputs.Call. Audio next to images has another projection, which its features record.

    Raises:
        ProcessError: the audio is shorter than one feature frame.
    """
    if modality == "audio":
        return _audio(processor, item, options, setting)
    outputs = processor.image_processor([item], **options)
    return outputs, processor.image_token * int(outputs["num_img_tokens"][0])


def _audio(processor: Any, item: Any, options: Mapping[str, Any], setting: str) -> tuple[Mapping[str, Any], str]:
    import torch

    extractor = processor.audio_processor
    if len(item) < extractor.win_length:
        raise ProcessError("The audio is shorter than one feature frame.", "Use a longer audio file.")
    outputs = extractor([item], **{"sampling_rate": extractor.sampling_rate, **options})
    features = {
        "audio_input_features": outputs["audio_input_features"],
        "next_to_images": torch.tensor([setting == WITH_OTHER_KIND]),
    }
    return features, processor.audio_token * int(outputs["audio_embed_sizes"][0])


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a text with numbered images or audio; other text is unchanged.

    Raises:
        PromptError: the numbers are not 1, 2, ... in this order.
    """
    found = list(_NUMBERED.finditer(text))
    if not found:
        return text
    for modality, noun in _NOUNS.items():
        numbers = [match[2] for match in found if match[1] == modality]
        if numbers != [str(number) for number in range(1, 1 + len(numbers))]:
            raise PromptError(
                f"The {noun}' numbers are not 1, 2, ... in order.",
                f"Write <|{modality}_1|>, then <|{modality}_2|>.",
            )
    pieces: list[str | ItemPlace] = []
    stop = 0
    for match in found:
        pieces += [text[stop : match.start()], ItemPlace(match[1])]
        stop = match.end()
    return tuple(piece for piece in (*pieces, text[stop:]) if piece)


def load(path: Path) -> Any:
    """Load the processor of a checkpoint; the main revision has custom code for what transformers also has.

    Its tokenizer does not record which tokens are the placeholders; the configuration does.
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


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size on the canvas in the outputs; see FamilyInputs.looks."""
    height, width = numbers(item.outputs["image_sizes"])
    return padded_over_tiles(item, (width, height), item.outputs["image_pixel_values"].shape[1])


INPUTS = FamilyInputs(
    call=call,
    load=load,
    rewrite=rewrite,
    host_only=frozenset(("num_img_tokens",)),
    depends_on={"audio": "image"},
    looks={"image": look},
    speech=SpeechForm("Transcribe the audio clip into text.", "Translate the audio to English."),
)
