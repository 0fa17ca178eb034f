"""Pipelines over the tiny checkpoints, made without an engine, and what their tests have in common."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from beheld.checkpoint.info import read_info
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.params import SamplingParams
from beheld.core.request import Request
from beheld.inputs.pipeline import InputPipeline, RequestOrder
from tests import tiny

ONE_TOKEN = SamplingParams(max_tokens=1)

# The families whose processors give what these tests compare tensor by tensor: features of items that are simply
# joined. All families, these too, are compared token by token in tests/oracle.
IMAGE_FAMILIES = ("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
VIDEO_FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl")
# Families with a chat template of their own.
CHAT_FAMILIES = tuple(family for family in tiny.TINY if family not in tiny.CHATLESS_FAMILIES)


@cache
def info(family: str) -> ModelInfo:
    """What the family's tiny checkpoint says."""
    args = EngineArgs(model=str(tiny.checkpoint(family)))
    return read_info(resolve(args), args)


def config(model: ModelInfo, **changes: Any) -> EngineConfig:
    """An engine's decisions, as far as the pipeline looks at them."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "block_size": 16,
        "max_encoder_tokens": 1024,
        "processor_cache_bytes": 64 << 20,
        "limit_per_prompt": dict.fromkeys(model.modalities, 999),
    }
    return EngineConfig(**(values | changes))


def make(family: str, changes: dict[str, Any] | None = None, **options: Any) -> InputPipeline:
    """A new pipeline; `changes` are to the decisions, `options` are EngineArgs."""
    model = info(family)
    return InputPipeline(model, config(model, **(changes or {})), EngineArgs(model=model.path, **options))


@cache
def shared(family: str) -> InputPipeline:
    """One pipeline per family, for tests that leave it as it is."""
    return make(family)


def ask(
    pipe: InputPipeline, family: str, images: Any = None, videos: Any = None, text: str = "Hi?", **more: Any
) -> Request:
    """A request with markers for every item."""
    count = {"image": len(images) if isinstance(images, list) else int(images is not None)}
    count["video"] = len(videos) if isinstance(videos, list) else int(videos is not None)
    prompt = tiny.prompt(family, count["image"], count["video"], text)
    data = {"image": images, "video": videos}
    return pipe.prepare(RequestOrder({"prompt": prompt, "multi_modal_data": data, **more}, ONE_TOKEN, request_id="0"))


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """The picture as a file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def write_video(path: Path, frames: Any, fps: int = 8, codec: str = "mpeg4", gop: int = 12) -> Path:
    """A video file of these frames."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options={"g": str(gop)})
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path
