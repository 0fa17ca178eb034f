"""Qwen2.5-Omni: images, videos and audio, each processed by the whole processor in a prompt of one placeholder.

The processor pads all audio to a window of minutes; here audio is padded only until the last feature frame comes out
the same, and the padding is then cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from beheld.core.errors import ProcessError
from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

Interleaved = tuple[str, Mapping[str, tuple[Any, ...]]]

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
        # The processor's own number, which a tensor would round.
        rate = own["fps"]
        step = made["video_second_per_grid"] if rate is None else [processor.video_processor.temporal_patch_size / rate]
        outputs["second_per_grids"] = step
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


def interleave(processor: Any, video: Mapping[str, tuple[Any, ...]], num_audio: int) -> Interleaved:
    """Return the text of a video with its audio, in chunks of time; see families.inputs.Interleave.

    An audio token takes one position. With chunks of 50 positions, and frames every 25, of two tokens each:

        video, positions 0 to 50     audio, positions 0 to 50     video, positions 50 to 100     ...
        V V (at 0) V V (at 25)       A x 50                       V V (at 50) V V (at 75)
    """
    rate = processor.position_id_per_seconds
    size = int(rate * processor.seconds_per_chunk)
    chunks = zip_longest(_chunks(frame_positions(processor, video, rate), size), _chunks(range(num_audio), size))
    pieces = (processor.video_token * (seen or 0) + processor.audio_token * (heard or 0) for seen, heard in chunks)
    return around(processor, "".join(pieces))


def frame_positions(processor: Any, video: Mapping[str, tuple[Any, ...]], rate: float) -> list[float]:
    """Return the position of each token of a video on the axis of time, at `rate` positions a second."""
    steps, height, width = video["video_grid_thw"]
    (seconds,) = video["second_per_grids"]
    each = (height // processor.video_processor.merge_size) * (width // processor.video_processor.merge_size)
    return [step * seconds * rate for step in range(steps) for _ in range(each)]


def around(processor: Any, text: str) -> Interleaved:
    """Return a video's text with the tokens around its audio, and the argument of get_rope_index that says so."""
    return processor.audio_bos_token + text + processor.audio_eos_token, {"use_audio_in_video": (True,)}


def _chunks(positions: Sequence[float], size: int) -> Iterator[int]:
    """Yield the number of tokens in each chunk of `size` positions.

    After a gap of several chunks, each chunk has the tokens of one position until they are no longer late.
    """
    count, number = 0, 1
    for position in positions:
        if position >= number * size:
            yield count
            count, number = 0, number + 1
        count += 1
    yield count


INPUTS = FamilyInputs(
    placeholders={
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    },
    layout=frozenset(("image_grid_thw", "video_grid_thw", "second_per_grids", "audio_seqlens")),
    host_only=frozenset(("second_per_grids", "audio_seqlens")),
    call=call,
    interleave=interleave,
    speech=SpeechForm("Transcribe the audio{language} into text.", "Translate the audio{language} into English text."),
)
