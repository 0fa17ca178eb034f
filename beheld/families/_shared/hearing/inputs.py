"""Prompts of encoder-decoders that hear: a prompt is what the decoder continues, and the audio belongs to its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs


def heard(
    start: str,
    features: tuple[str, ...],
    states: Callable[[Mapping[str, Any], Path], int],
    speech: SpeechForm | None,
) -> FamilyInputs:
    """Return the inputs of a family.

    Args:
        start: the token that starts every transcript, which the audio belongs to.
        features: outputs of the feature extractor that the encoder takes.
        states: see FamilyInputs.
        speech: likewise.
    """

    def call(
        processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
    ) -> tuple[Mapping[str, Any], tuple[int, ...]]:
        extractor = processor.feature_extractor
        made = extractor([item], **{**options, "return_tensors": "pt", "sampling_rate": extractor.sampling_rate})
        return {name: made[name] for name in features if name in made}, (
            processor.tokenizer.convert_tokens_to_ids(start),
        )

    def rewrite(text: str, counts: Mapping[str, int]) -> str:
        return text if start in text else start + text

    return FamilyInputs(
        placeholders={"audio": start},
        call=call,
        rewrite=rewrite,
        rewritten_ends="written",
        most={"audio": 1},
        states=states,
        speech=speech,
        closes="its decoder starts a new transcript",
    )


def fast_conformer_states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states of NVIDIA's FastConformer, whose convolutions halve the frames several times."""
    config = read_json(folder / CONFIG).get("encoder_config") or {}
    frames, kernel = int(outputs["attention_mask"].sum()), int(config.get("subsampling_conv_kernel_size", 3))
    stride, factor = int(config.get("subsampling_conv_stride", 2)), int(config.get("subsampling_factor", 8))
    for _ in range(factor.bit_length() - 1):
        frames = (frames + 2 * ((kernel - 1) // 2) - kernel) // stride + 1
    return frames
