"""MiniCPM-o's processor: MiniCPM-V's, and mel frames of audio in windows of 30 seconds.

Shapes: C windows of all audio items, N items, M mel bins, F feature frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import BatchFeature, WhisperFeatureExtractor

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.processing import AudioOptions
from beheld.families.minicpmo.config import num_embeds
from beheld.families.minicpmv.processing import MiniCPMVProcessor
from beheld.families.minicpmv.processing import load as load_vision

START, END = "<|audio_start|>", "<|audio_end|>"
_WINDOW_S = 30
# Of the text, mel frames of what it marks.
_MARKED_FRAMES = 100
_OPTIONS = ("sampling_rate", "hop_length", "chunk_length", "n_fft", "padding_value", "dither")


class WindowExtractor(WhisperFeatureExtractor):
    """Whisper's mel frames of windows, without their padding."""

    valid_kwargs: Any = AudioOptions

    def windows(self, wave: Any, do_normalize: bool | None = None) -> list[torch.Tensor]:
        """Return the frames (M, F) of each window of an audio item."""
        samples = np.asarray(wave, dtype=np.float32)
        size = _WINDOW_S * self.sampling_rate
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        made = self(
            parts,
            sampling_rate=self.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            do_normalize=do_normalize,
        )
        lengths = np.asarray(made["attention_mask"]).sum(-1).tolist()
        return [torch.as_tensor(frames)[:, :n] for frames, n in zip(made["input_features"], lengths, strict=True)]


class MiniCPMOProcessor(MiniCPMVProcessor):
    """Images, videos, audio and text of a prompt.

    Attributes:
        feature_extractor: a WindowExtractor.
        pool_step: encoder positions of one embedding.
        marked: whether the text marks each second of audio.
    """

    feature_extractor: Any = None
    pool_step = 2
    marked = True

    def audio_words(self, num_samples: int) -> str:
        """Return the text that an audio item of so many samples stands for."""
        return self.audio_marks(num_embeds(math.ceil(num_samples / self.feature_extractor.hop_length), self.pool_step))

    def audio_marks(self, count: int) -> str:
        """Return the text that an audio item of so many embeddings stands for."""
        most = num_embeds(_MARKED_FRAMES, self.pool_step) if self.marked else max(count, 1)
        return "".join(f"{START}{'<unk>' * min(most, count - start)}{END}" for start in range(0, count, most))

    def audio(self, wave: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the outputs and the text of an audio item."""
        windows = self.feature_extractor.windows(wave, options.get("do_normalize"))
        lengths = [frames.shape[1] for frames in windows]
        filled = [pad(frames, (0, max(lengths) - frames.shape[1])) for frames in windows]
        outputs = {
            "audio_features": torch.stack(filled),
            "audio_feature_lens": torch.tensor(lengths),
            "audio_num_windows": torch.tensor([len(windows)]),
        }
        return outputs, self.audio_words(len(wave))

    def __call__(
        self,
        text: Sequence[str],
        images: Any = None,
        videos: Any = None,
        return_tensors: str = "pt",
        audio: Sequence[Any] | None = None,
        audio_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Prepare one prompt with its media; as MiniCPMVProcessor's, and each audio item as if it were alone."""
        (prompt,) = text
        heard = [self.audio(wave, audio_kwargs or {}) for wave in audio or ()]
        for _, words in heard:
            prompt = prompt.replace(self.marks["audio"], words, 1)
        made = super().__call__([prompt], images, videos, return_tensors, **options)
        if not heard:
            return made
        longest = max(outputs["audio_features"].shape[-1] for outputs, _ in heard)
        for outputs, _ in heard:
            frames = outputs["audio_features"]
            outputs["audio_features"] = pad(frames, (0, longest - frames.shape[-1]))
        media = {name: torch.cat([outputs[name] for outputs, _ in heard]) for name in heard[0][0]}
        ids = made["input_ids"]
        start, end = (ids == self.tokenizer.convert_tokens_to_ids(token) for token in (START, END))
        # 3 between the marks of audio, as in transformers' processors.
        kinds = 3 * ((start.cumsum(-1) - end.cumsum(-1) > 0) & ~start)
        return BatchFeature({**made, **media, "mm_token_type_ids": kinds})


def load(path: Path, marks: Mapping[str, str]) -> MiniCPMOProcessor:
    """Make the processor of the checkpoint in `path`; `marks` says what stands for an item in a text, by modality.

    Raises:
        ModelError: preprocessor_config.json is missing.
    """
    made = load_vision(path, marks, MiniCPMOProcessor)
    raw, settings = read_json(path / CONFIG), read_json(path / "preprocessor_config.json")
    bins = settings.get("feature_size") or (raw.get("audio_config") or {}).get("num_mel_bins") or 80
    known = {name: settings[name] for name in _OPTIONS if name in settings}
    made.feature_extractor = WindowExtractor(feature_size=bins, **known)
    made.pool_step = raw.get("audio_pool_step", 2)
    made.marked = raw.get("chunk_input", True)
    return made
