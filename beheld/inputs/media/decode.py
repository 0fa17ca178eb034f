"""Decodes bytes, arrays and PIL images to 8-bit RGB images, and records what was lost.

An image becomes what `ImageOps.exif_transpose(image).convert("RGB")` gives, with two exceptions: transparency is
composited on white, as models were trained, and 16-bit grey is scaled to 8 bits where a plain conversion would clip it
to white.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError, ParamsError, first_line
from beheld.inputs.media import header

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Further formats that an operator may allow; icons and HEIC are read by other functions.
_FURTHER = ("TIFF", "PPM", "AVIF")
_HEIF = "HEIF"
_ORIENTATION = 0x0112
# Below this many pixels, a file of any size is accepted.
_ANY_PIXELS = 16_000_000
_SHRINK = "Shrink it first."
_WIDE_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A decoded image: RGB, its source, its treatment, and what was lost."""

    image: Any
    given: Mapping[str, Any]
    treated: Mapping[str, Any]
    lost: tuple[str, ...]


Colour = tuple[int, int, int]
# What is transparent shows it, as models were trained; and the option that says another.
WHITE: Colour = (255, 255, 255)
BACKGROUND = "rgba_background_color"

# Pillow loads a file into its image on first use, seeks in it to count frames, and reads its tags late. None of this is
# thread-safe: other threads would see half-loaded images, or no tags. The lock is re-entrant: if Ctrl-C interrupts
# between acquire and release, the main thread still holds it and passes.
_LOCKS = tuple(threading.RLock() for _ in range(64))


@contextmanager
def alone_with(image: Any) -> Iterator[None]:
    """Lock this PIL image of the user, who may pass it several times, against other threads of ours."""
    lock = _LOCKS[id(image) // 16 % len(_LOCKS)]
    with lock:
        yield


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_image(value: Any) -> bool:
    """Return whether a value is a PIL image."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def background_of(given: Any) -> Colour:
    """The colour behind what is transparent, of three whole numbers from 0 to 255.

    Raises:
        ParamsError: it is none.
    """
    parts = tuple(given) if isinstance(given, list | tuple) else ()
    if len(parts) != 3 or not all(type(part) is int and 0 <= part <= 255 for part in parts):
        words = f"{BACKGROUND} must be three whole numbers from 0 to 255, got {str(given)[:64]!r}."
        raise ParamsError(words, "Write for example [0, 0, 0].", param=BACKGROUND)
    return parts


def open_bytes(data: bytes, limits: MediaLimits, background: Colour = WHITE) -> DecodedImage:
    """Decode the bytes of an image file; the bytes determine the format, not the sender's label.

    Raises:
        DecodeError: not an image of a known format, or broken.
        LimitError: more pixels than allowed, according to the header, before decoding.
    """
    from PIL import Image

    every = limits.image_formats == "all"
    icon = header.largest_icon(data) if every else None
    if icon is not None:
        return _from_icon(data, *icon, limits, background)
    if every and header.is_heif(data):
        return _from_heif(data, limits, background)
    try:
        image = Image.open(io.BytesIO(data), formats=(*FORMATS, *_FURTHER) if every else FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LimitError("The image has too many pixels.", _SHRINK) from error
    except Exception as error:
        raise _unreadable(data, every) from error
    check_size(*image.size, limits, len(data))
    check_scans(data, image.width * image.height, limits)
    return from_pil(image, limits, image.format, background)


def _unreadable(data: bytes, every: bool) -> DecodeError:
    """The error for bytes that no decoder takes; it names their format, if they show one.

    Args:
        data: the file.
        every: the engine reads all formats, not only the usual ones.
    """
    found = header.format_of(data)
    never = found in ("JPEG 2000", "JPEG XL", "SVG", "HTML")
    # Where the engine reads the format, the file is broken.
    named = never or (found is not None and not every)
    reason = f"The bytes are {found}, which is not read." if named else "The bytes are not an image that can be read."
    remedy = f"Known formats: {', '.join((*FORMATS, *_FURTHER, 'ICO', 'HEIC') if every else FORMATS)}."
    if header.is_pdf(data) or found == "TIFF":
        remedy = f"Send it as a part of the type 'file' of a chat message, which becomes its pages. {remedy}"
    elif found == "HTML":
        remedy = f"Give the address of the image itself, not that of a page. {remedy}"
    allow = "" if every or never else 'allow TIFF, ICO, PPM, AVIF and HEIC with media_limits={"image_formats": "all"}'
    return DecodeError(reason, remedy, or_engine=allow)


def _from_icon(
    data: bytes, picture: bytes, size: tuple[int, int], limits: MediaLimits, background: Colour
) -> DecodedImage:
    """Decode the largest picture of a file of icons, which its own bytes measure: Pillow decodes it at once.

    Pillow gets a file of that picture alone. Of several that are equally large by the table, it would take another one.
    """
    from PIL import Image

    check_size(*size, limits, len(data))
    if header.is_png(picture):
        decoded = open_bytes(picture, limits, background)
        return DecodedImage(decoded.image, {**decoded.given, "format": "ICO"}, decoded.treated, decoded.lost)
    try:
        image = Image.open(io.BytesIO(header.icon_of(picture, size)), formats=("ICO",))
    except Exception as error:
        raise DecodeError("The icon is broken.", "Send the complete file.", detail=first_line(error)) from error
    return from_pil(image, limits, "ICO", background)


def _from_heif(data: bytes, limits: MediaLimits, background: Colour) -> DecodedImage:
    """Decode HEIC and its kin, which Pillow reads with another package alone.

    Raises:
        DecodeError: the package is not installed, or the file is broken.
        LimitError: more pixels than allowed.
    """
    try:
        import pillow_heif
    except ImportError as error:
        raise DecodeError(
            "This is HEIC, which needs the package pillow-heif.",
            "Send it as JPEG.",
            or_engine="pip install pillow-heif",
        ) from error
    try:
        file = pillow_heif.open_heif(data, convert_hdr_to_8bit=True)
        width, height = file.size
        check_size(width, height, limits, len(data))
        image = file.to_pillow()
    except (LimitError, MemoryError):
        raise
    except Exception as error:
        raise DecodeError("The image is broken.", "Send the complete file.", detail=first_line(error)) from error
    return from_pil(image, limits, _HEIF, background)


def check_header(data: bytes, limits: MediaLimits) -> None:
    """Check the size in an image's header, without decoding.

    Raises:
        LimitError: more pixels than allowed.
    """
    size = header.size_of(data)
    if size is not None:
        check_size(*size, limits, len(data))


def check_size(width: int, height: int, limits: MediaLimits, num_bytes: int | None = None) -> None:
    """Check an image's size.

    Args:
        width, height: in pixels.
        limits: on pixels.
        num_bytes: the size of its file, if it has one.

    Raises:
        LimitError: more pixels than allowed, or far more than its file can describe.
    """
    pixels = width * height
    if pixels > limits.max_pixels:
        raise LimitError(f"The image has {width} x {height} pixels; the limit is {limits.max_pixels}.", _SHRINK)
    if num_bytes is not None and pixels > max(_ANY_PIXELS, limits.max_pixels_per_byte * num_bytes):
        raise LimitError(f"The image has {width} x {height} pixels in only {num_bytes} bytes.", _SHRINK)


def check_scans(data: bytes, pixels: int, limits: MediaLimits) -> None:
    """Check how much work a JPEG's scans make. It reads the whole file, so it belongs where the file is decoded.

    Raises:
        LimitError: too much.
    """
    scans = header.scans_of(data)
    if scans > 1 and scans * pixels > limits.max_scanned_pixels:
        raise LimitError(
            f"The image has {scans} scans of {pixels} pixels; the limit is {limits.max_scanned_pixels} pixels in all.",
            "Save it again, with fewer scans or fewer pixels.",
        )


def from_pil(
    image: Any, limits: MediaLimits, file_format: str | None = None, background: Colour = WHITE
) -> DecodedImage:
    """Convert a PIL image to RGB; what is transparent shows the background.

    Raises:
        DecodeError: it is empty, truncated or broken.
        LimitError: more pixels than allowed.
    """
    width, height = image.size
    if width < 1 or height < 1:
        raise DecodeError(f"The image is empty: {width} x {height} pixels.", "Send one of at least 1 x 1.")
    check_size(width, height, limits)
    given = described(image, file_format)
    lost: list[str] = []
    frames = _frame_count(image)
    if frames > 1:
        lost.append(f"only the first of {frames} frames of the animated image was used")
    try:
        image.load()
        turned, orientation = _upright(image)
        rgb = to_rgb(turned, lost, background)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:
        # On broken bytes Pillow raises exceptions of any kind.
        raise DecodeError("The image is broken.", "Send the complete file.", detail=first_line(error)) from error
    treated = {"exif_rotated": True, "exif_orientation": orientation} if orientation != 1 else {}
    return DecodedImage(rgb, given, treated, tuple(lost))


def described(image: Any, file_format: str | None) -> dict[str, Any]:
    """Describe an image's original form for receipts."""
    given: dict[str, Any] = {"width": image.width, "height": image.height, "mode": image.mode}
    if file_format:
        given["format"] = file_format
    return given


def is_plain_rgb(image: Any) -> bool:
    """Return whether the image already is what the model would see, so that its pixels are its content."""
    return (
        image.mode == "RGB"
        and "transparency" not in image.info
        and _orientation(image) == 1
        and _frame_count(image) == 1
    )


def from_array(array: Any, limits: MediaLimits, background: Colour = WHITE) -> DecodedImage:
    """Decode an array (height, width, 3), (height, width, 4), (height, width, 1) or (height, width) of bytes.

    Raises:
        DecodeError: another shape or type.
        LimitError: more pixels than allowed.
    """
    import numpy as np
    from PIL import Image

    shape = tuple(array.shape)
    if array.dtype != np.uint8:
        raise DecodeError(
            f"An image as an array must hold bytes (uint8), not {array.dtype}.", "Scale it to 0 to 255 and convert it."
        )
    if len(shape) == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and shape[2] in (3, 4))) or 0 in shape:
        planes = len(shape) == 3 and shape[0] in (1, 3, 4)
        raise DecodeError(
            f"An image as an array must have the shape (height, width, 3), not {shape}.",
            "Put its colours last: numpy.moveaxis(array, 0, 2)." if planes else "Bring it into that shape.",
        )
    decoded = from_pil(Image.fromarray(np.ascontiguousarray(array)), limits, None, background)
    return DecodedImage(decoded.image, {**decoded.given, "source": "array"}, decoded.treated, decoded.lost)


def to_rgb(image: Any, lost: list[str], background: Colour = WHITE) -> Any:
    """Return an RGB image; appends to `lost` what the conversion discards."""
    from PIL import Image

    if image.mode in _WIDE_MODES:
        lost.append("more than 8 bits per channel were reduced to 8")
        return _narrow(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        alpha = layered.getchannel("A")
        if alpha.getextrema()[0] == 255:
            return layered.convert("RGB")
        shown = "white" if background == WHITE else f"the colour {list(background)}"
        lost.append(f"transparency was flattened onto {shown}")
        page = Image.new("RGB", layered.size, background)
        page.paste(layered, mask=alpha)
        return page
    if image.mode == "CMYK":
        lost.append("CMYK colours were converted to RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _narrow(image: Any) -> Any:
    """Scale grey values of 16 bits or more to 8 bits."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    if image.mode == "F":
        if not np.isfinite(values).all():
            raise DecodeError("The image holds values that are not finite.", "Replace them first.")
        scaled = values * 255.0 if values.size and values.min() >= 0.0 and values.max() <= 1.0 else values
        return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))
    wide = values.astype(np.int64)
    if image.mode == "I" and wide.max(initial=0) <= 255:
        return Image.fromarray(np.clip(wide, 0, 255).astype(np.uint8))
    return Image.fromarray((np.clip(wide, 0, 65535) >> 8).astype(np.uint8))


def _upright(image: Any) -> tuple[Any, int]:
    """Return the image turned by its EXIF orientation, and that orientation."""
    from PIL import ImageOps

    orientation = _orientation(image)
    if orientation == 1:
        return image, 1
    return ImageOps.exif_transpose(image), orientation


def _orientation(image: Any) -> int:
    """Return the EXIF orientation, 1 (upright) to 8; a broken EXIF block counts as upright."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _frame_count(image: Any) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:
        # Counting frames may read past a broken one; loading the first frame then reports the error.
        return 1
