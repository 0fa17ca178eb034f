"""Qwen2.5-Omni: images, videos and audio, each processed by the whole processor in a prompt of one placeholder.

The processor pads all audio to a window of minutes; here audio is padded only until the last feature frame comes out
the same, and the padding is then cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ProcessError
from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

_AUDIO_TRACK = "A video's audio track is not read: send it as a separate audio item."
_NAMES = {"image": "images", "video": "videos", "audio": "audio"}
_FEATURES = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
    "audio": ("input_features", "feature_attention_mask"),
}


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one item; see families.inputs.Call."""
    own = {name: value for name, value in options.items() if name != "return_tensors"}
    if modality == "audio":
        if len(item) <= processor.feature_extractor.n_fft // 2:
            raise ProcessError(f"The audio has only {len(item)} samples.", "Use a longer audio file.")
        own["max_length"] = _padded(len(item), processor.feature_extractor)
    elif modality == "video" and own.get("fps") is None:
        own["fps"] = _rate(own)
    placeholder = getattr(processor, f"{modality}_token")
    group = {"images": "images_kwargs", "videos": "videos_kwargs", "audio": "audio_kwargs"}[_NAMES[modality]]
    made = processor(text=[placeholder], return_tensors="pt", **{_NAMES[modality]: [item], group: own})
    outputs = {name: made[name] for name in _FEATURES[modality]}
    if modality == "video":
        outputs["second_per_grids"] = made["video_second_per_grid"]
    elif modality == "audio":
        frames = int(made["feature_attention_mask"].sum())
        outputs = {name: value[..., :frames] for name, value in outputs.items()} | {"audio_seqlens": [frames]}
    return outputs, placeholder * made["input_ids"].shape[1]


def _padded(samples: int, extractor: Any) -> int:
    """Return a length whose silence after the audio fills the last frame's window; at most the processor's."""
    hop = extractor.hop_length
    return min(int(extractor.n_samples), -(-(samples + extractor.n_fft) // hop) * hop)


def _rate(options: Mapping[str, Any]) -> float | None:
    """Return the sampled frames per second; None (the processor's guess) if unknown."""
    known = options.get("video_metadata")
    return float(known[0].sampled_fps) if known and known[0].fps else None


INPUTS = FamilyInputs(
    placeholders={
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    },
    layout=frozenset(("image_grid_thw", "video_grid_thw", "second_per_grids", "audio_seqlens")),
    host_only=frozenset(("second_per_grids", "audio_seqlens")),
    call=call,
    unbuilt=dict.fromkeys(("use_audio_in_video", "load_audio_from_video"), _AUDIO_TRACK),
    speech=SpeechForm("Transcribe the audio{language} into text.", "Translate the audio{language} into English text."),
)
