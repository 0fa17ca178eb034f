"""Media as base64 and data URLs, as scripts make them for chat messages."""

from __future__ import annotations

import base64
import io
from typing import Any

from beheld.core.errors import ParamsError


def encode_image_base64(image: Any, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """A PIL image as base64 of a file."""
    buffer = io.BytesIO()
    image.convert(image_mode).save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode()


def encode_image_url(image: Any, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """A PIL image as a data URL."""
    return f"data:image/{format.lower()};base64,{encode_image_base64(image, image_mode=image_mode, format=format)}"


def encode_audio_base64(audio: Any, sampling_rate: int, *, format: str = "WAV") -> str:
    """Samples (mono, float) as base64 of a file."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, audio, sampling_rate, format=format)
    return base64.b64encode(buffer.getvalue()).decode()


def encode_audio_url(audio: Any, sampling_rate: int, *, format: str = "WAV") -> str:
    """Samples (mono, float) as a data URL."""
    return f"data:audio/{format.lower()};base64,{encode_audio_base64(audio, sampling_rate, format=format)}"


def encode_video_base64(frames: Any, *, format: str = "JPEG") -> str:
    """Frames (frames, height, width, 3) of bytes as base64 of JPEG files, with commas between them.

    Raises:
        ParamsError: another format.
    """
    from PIL import Image

    if format.upper() != "JPEG":
        raise ParamsError(f"Frames are encoded as JPEG, not as {format}.", "Leave format out.", param="format")
    return ",".join(encode_image_base64(Image.fromarray(frame), format="JPEG") for frame in frames)


def encode_video_url(frames: Any, *, format: str = "JPEG") -> str:
    """Frames as a data URL, which a message's `video_url` takes; arguments as for `encode_video_base64`."""
    return f"data:video/jpeg;base64,{encode_video_base64(frames, format=format)}"


def rescale_image_size(image: Any, size_factor: float, transpose: int = -1) -> Any:
    """A PIL image of another size, `transpose` being one of PIL's methods or -1."""
    made = image.resize((int(image.width * size_factor), int(image.height * size_factor)))
    return made if transpose < 0 else made.transpose(transpose)


def rgba_to_rgb(image: Any, background_color: tuple[int, int, int] = (255, 255, 255)) -> Any:
    """A PIL image with transparency, laid on a colour."""
    from PIL import Image

    made = Image.new("RGB", image.size, background_color)
    made.paste(image, mask=image.split()[3])
    return made
