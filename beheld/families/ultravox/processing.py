"""Ultravox's processor: mel frames of a whole audio item, in chunks of the encoder's window.

Shapes: C chunks of all items, N items, M mel bins, F feature frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import BatchFeature, ProcessorMixin, WhisperFeatureExtractor

from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.secondary import described, secondary_weights
from beheld.core.config import EngineArgs
from beheld.families._shared.processing import AudioOptions
from beheld.families.ultravox import FAMILY

MARK = "<|audio|>"
_SETTINGS = "preprocessor_config.json"


class MelExtractor(WhisperFeatureExtractor):
    """Whisper's mel frames, without padding to the window."""

    valid_kwargs: Any = AudioOptions

    def frames(self, wave: Any, do_normalize: bool | None = None) -> torch.Tensor:
        """Return the frames (M, F) of a whole audio item, of which the last hop is filled up with zeros."""
        samples = np.asarray(wave, dtype=np.float32)
        # Fewer have no spectrum.
        samples = np.pad(samples, (0, max(0, 2 * self.hop_length - len(samples))))
        made = self(
            samples,
            sampling_rate=self.sampling_rate,
            padding="longest",
            pad_to_multiple_of=self.hop_length,
            truncation=False,
            do_normalize=do_normalize,
        )
        return torch.as_tensor(made["input_features"][0])


class UltravoxProcessor(ProcessorMixin):
    """Audio and text of a prompt.

    Args:
        feature_extractor: a MelExtractor.
        tokenizer: transformers' tokenizer.
        window: mel frames that the encoder takes at once.
        step: mel frames of one embedding.
    """

    def __init__(self, feature_extractor: Any, tokenizer: Any, window: int, step: int) -> None:
        super().__init__(feature_extractor, tokenizer)
        self.window, self.step = window, step
        known = tokenizer.get_added_vocab()
        self.audio_token = next((token for token in FAMILY.placeholder_tokens["audio"] if token in known), MARK)

    def audio(self, wave: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the outputs of one audio item, and the text that it stands for."""
        frames = self.feature_extractor.frames(wave, options.get("do_normalize"))
        chunks = list(frames.split(self.window, dim=1))
        lengths = [chunk.shape[1] for chunk in chunks]
        if len(chunks) > 1:
            chunks[-1] = pad(chunks[-1], (0, self.window - lengths[-1]))
        outputs = {
            "audio_values": torch.stack(chunks),
            "audio_lens": torch.tensor(lengths),
            "audio_num_chunks": torch.tensor([len(chunks)]),
        }
        return outputs, self.audio_token * sum(-(-length // self.step) for length in lengths)

    def __call__(
        self,
        text: Sequence[str],
        audio: Sequence[Any] | None = None,
        audio_kwargs: Mapping[str, Any] | None = None,
        return_tensors: str = "pt",
        **options: Any,
    ) -> Any:
        """Prepare one prompt with its audio items, each as if it were alone; the caller writes the special tokens."""
        (prompt,) = text
        made = [self.audio(wave, audio_kwargs or {}) for wave in audio or ()]
        first, *rest = prompt.split(MARK)
        texts = [first]
        for (_, filled), part in zip(made, rest, strict=True):
            texts += [filled, part]
        ids = [index for part in texts if part for index in self.tokenizer(part, add_special_tokens=False)["input_ids"]]
        media: dict[str, Any] = {}
        if made:
            longest = max(outputs["audio_values"].shape[-1] for outputs, _ in made)
            for outputs, _ in made:
                values = outputs["audio_values"]
                outputs["audio_values"] = pad(values, (0, longest - values.shape[-1]))
            media = {name: torch.cat([outputs[name] for outputs, _ in made]) for name in made[0][0]}
        prepared = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], **media}
        return BatchFeature(prepared, tensor_type=return_tensors)


def load(path: Path) -> UltravoxProcessor:
    """Make the processor of the checkpoint in `path`.

    The encoder's checkpoint may hold the settings of its features; else they are Whisper's own.

    Raises:
        ModelError: the encoder's checkpoint is missing.
    """
    from transformers import AutoTokenizer

    from beheld.checkpoint.convert import own_config
    from beheld.families.ultravox.config import UltravoxConfig

    args = EngineArgs(model=str(path))
    raw = read_json(path / CONFIG)
    config = UltravoxConfig.from_dict(dict(described(raw, path, args)))
    folders = (path, *(Path(part.path) for part in secondary_weights(path, args)))
    settings = next((found for folder in folders if (found := read_json(folder / _SETTINGS))), {})
    bins = {"feature_size": config.audio_config.num_mel_bins}
    extractor = MelExtractor(**(bins | {name: value for name, value in settings.items() if name in _OPTIONS}))
    tokenizer = AutoTokenizer.from_pretrained(str(path), **own_config(raw))
    window = 2 * config.audio_config.max_source_positions
    return UltravoxProcessor(extractor, tokenizer, window, 2 * config.stack_factor)


_OPTIONS = frozenset(
    ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft", "padding_value", "dither")
)
