"""Pictures, videos, sounds and prompts to feed the tiny checkpoints with."""

from __future__ import annotations

import io
import wave as wave_file

import numpy as np
from PIL import Image, ImageDraw

QWEN_TURN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
GEMMA_TURN = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
FORMS = {
    "llava": "USER: {} ASSISTANT:",
    "llava_next": "[INST] {} [/INST]",
    "llava_onevision": "<|im_start|>user {}<|im_end|><|im_start|>assistant\n",
    "qwen2_vl": QWEN_TURN,
    "qwen2_5_vl": QWEN_TURN,
    "llama": "[INST] {} [/INST]",
    "qwen2": QWEN_TURN,
    "mistral": "[INST] {} [/INST]",
    "gemma2": GEMMA_TURN,
    "gemma3_text": GEMMA_TURN,
}
"""Family -> its user turn, with {} where the content stands, ready for the answer."""

QWEN_MARKERS = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
MARKERS = {"qwen2_vl": QWEN_MARKERS, "qwen2_5_vl": QWEN_MARKERS}
"""Family -> what stands in its prompts for a picture and for a video, where that differs from LLaVA's."""

SOUND_MARKERS: dict[str, str] = {}
"""Family -> what stands in its prompts for a sound."""
SOUND_RATE = 16000
"""Samples per second of `sound`: what every family's processor wants, so that nothing is resampled."""

SIZES = ((84, 56), (56, 112), (140, 84), (70, 70), (112, 112), (33, 97), (128, 64), (224, 145))
"""Widths and heights that `pictures` goes through; the last is above every tiny processor's limit."""


def pictures(n: int, seed: int = 0) -> list[Image.Image]:
    """`n` RGB pictures, each of another of SIZES: a shape on a gradient with noise; other seeds give other content."""
    made = []
    for index in range(n):
        width, height = SIZES[(index + seed) % len(SIZES)]
        made.append(picture(width, height, 1000 * seed + index))
    return made


def picture(width: int, height: int, seed: int) -> Image.Image:
    """One RGB picture of that size in pixels."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (4, 3)).astype(np.float64)
    down, right = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    ground = (corners[0] * (1 - right) + corners[1] * right) * (1 - down)
    ground = ground + (corners[2] * (1 - right) + corners[3] * right) * down
    ground = np.clip(ground + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)
    image = Image.fromarray(ground)
    draw = ImageDraw.Draw(image)
    colour = tuple(int(value) for value in rng.integers(0, 256, 3))
    left, top = int(rng.integers(0, width // 2)), int(rng.integers(0, height // 2))
    box = (left, top, left + width // 3, top + height // 3)
    (draw.ellipse if seed % 2 else draw.rectangle)(box, fill=colour)
    return image


def frames(n: int, seed: int = 0, width: int = 84, height: int = 56) -> np.ndarray:
    """A video of `n` frames, uint8 (n, height, width, 3): a square crosses a fixed ground."""
    ground = np.asarray(picture(width, height, 500 + seed))
    video = np.repeat(ground[None], n, axis=0)
    rng = np.random.default_rng(seed)
    colour, top = rng.integers(0, 256, 3), int(rng.integers(0, height - 16))
    for index in range(n):
        left = (index * (width - 16)) // max(n - 1, 1)
        video[index, top : top + 16, left : left + 16] = colour
    return video


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """A sound at SOUND_RATE, float32 within -1 to 1: three tones that swell at their own times, over noise."""
    rng = np.random.default_rng(7000 + seed)
    time = np.arange(round(seconds * SOUND_RATE)) / SOUND_RATE
    wave = rng.normal(0, 0.01, len(time))
    for _ in range(3):
        pitch, centre, width = rng.uniform(120, 3000), rng.uniform(0, seconds), rng.uniform(0.05, 0.4)
        wave += 0.25 * np.sin(2 * np.pi * pitch * time) * np.exp(-(((time - centre) / width) ** 2))
    return np.clip(wave, -1, 1).astype(np.float32)


def wav(wave: np.ndarray, rate: int = SOUND_RATE) -> bytes:
    """A mono sound as a WAV file of 16 bits."""
    buffer = io.BytesIO()
    with wave_file.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((wave * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def markers(name: str, num_images: int = 0, num_videos: int = 0, num_sounds: int = 0) -> str:
    """What stands in a prompt of family `name` for that many pictures, then videos, then sounds."""
    image, video = MARKERS.get(name, ("<image>\n", "<video>\n"))
    return image * num_images + video * num_videos + SOUND_MARKERS.get(name, "") * num_sounds


def prompt(name: str, num_images: int = 0, num_videos: int = 0, text: str = "What is in this picture?") -> str:
    """A whole prompt in the form that the family's model was trained on: media first, then `text`."""
    return wrap(name, markers(name, num_images, num_videos) + text)


def wrap(name: str, content: str) -> str:
    """`content` (with its markers) as the user's turn of family `name`, ready for the answer."""
    return FORMS[name].replace("{}", content)
