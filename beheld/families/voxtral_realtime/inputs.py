"""Voxtral Realtime: an audio between silence, and the tokens that the model writes while it only listens.

What the library mistral-common would write is made here of the settings in tekken.json; times and their defaults are
those of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs, ItemPlace

_PAD = "[STREAMING_PAD]"
# Tokens in which the longest word is over.
_WORD = 10


@dataclass(frozen=True)
class Rhythm:
    """How an audio and its tokens keep time.

    Attributes:
        frames: of the spectrogram, for each token.
        delay: tokens from a word's end to its first token.
        left: tokens of silence before an audio.
    """

    frames: int
    delay: int
    left: int

    @classmethod
    def of(cls, folder: Path) -> Rhythm:
        """Read that of the checkpoint in a folder."""
        config, audio = read_json(folder / CONFIG), read_json(folder / "tekken.json").get("audio")
        audio = audio if isinstance(audio, Mapping) else {}
        # Layers are scaled by the same delay.
        delay = config.get("default_num_delay_tokens", 6)
        left = audio.get("streaming_n_left_pad_tokens", 32)
        return cls(int(config.get("audio_length_per_tok", 8)), int(delay), int(left))

    def padded(self, samples: Any, hop: int) -> Any:
        """Return samples between silence, so that they take whole tokens.

        Args:
            samples: (N,).
            hop: samples from one frame to the next.
        """
        import numpy as np

        unit = self.frames * hop
        return np.pad(samples, (self.left * unit, -len(samples) % unit + (self.delay + 1 + _WORD) * unit))


def load(folder: Path) -> Any:
    """Return the feature extractor and the tokenizer as a processor; transformers' needs mistral-common."""
    from transformers import AutoTokenizer, ProcessorMixin, VoxtralRealtimeFeatureExtractor

    class Parts(ProcessorMixin):
        def __init__(self, feature_extractor: Any, tokenizer: Any) -> None:
            super().__init__(feature_extractor, tokenizer)

    return Parts(
        VoxtralRealtimeFeatureExtractor.from_pretrained(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    )


def variant(folder: Path) -> FamilyInputs:
    """Return the inputs of the checkpoint in a folder, whose files tell how audio and tokens keep time."""
    rhythm = Rhythm.of(folder)

    def call(
        processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
    ) -> tuple[Mapping[str, Any], tuple[int, ...]]:
        """Run the feature extractor on one audio; the tokens during which the model only listens belong to it."""
        extractor, tokenizer = processor.feature_extractor, processor.tokenizer
        samples = rhythm.padded(item, extractor.hop_length)
        made = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        whole = made["input_features"].shape[-1] // rhythm.frames * rhythm.frames
        pads = (tokenizer.convert_tokens_to_ids(_PAD),) * (rhythm.left + rhythm.delay)
        return {"input_features": made["input_features"][..., :whole]}, (tokenizer.bos_token_id, *pads)

    def states(outputs: Mapping[str, Any], folder: Path) -> int:
        """Return how many tokens an audio takes; see FamilyInputs."""
        return int(outputs["input_features"].shape[-1]) // rhythm.frames

    return replace(INPUTS, call=call, states=states)


def rewrite(text: str, counts: Mapping[str, int]) -> tuple[str | ItemPlace, ...]:
    """Put the audio's tokens before the words that the answer continues; there are usually none."""
    return ItemPlace("audio"), text


INPUTS = FamilyInputs(
    variant=variant,
    load=load,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    most={"audio": 1},
    answer_within_states=True,
    speech=SpeechForm("", window_s=300.0, written=True),
    closes="its answer keeps time with an audio",
)
