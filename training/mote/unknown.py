"""Pictures of what mote does not know: photographs of a folder, screenshots, noise, textures and paintings.

All but photographs are drawn here. A photograph is cropped, turned over and shrunk, and a picture with transparent
parts is laid on a background, so that few files make many pictures.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageStat

from training.mote.fonts import font_paths, load_font
from training.mote.words import WORDS

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
_LEAST_SIDE, _MOST_SIDE = 120, 1200
_LEAST_DEVIATION = 16.0


def photo_files(folder: Path) -> list[list[Path]]:
    """The picture files under each folder of a folder, sorted; those right in it are a group of their own."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _ENDINGS and path.is_file():
            inner = path.relative_to(folder).parts
            groups.setdefault(inner[0] if len(inner) > 1 else "", []).append(path)
    return list(groups.values())


def photograph(rng: Random, photos: list[list[Path]]) -> Image.Image:
    """A part of a picture, at least a third of each side, in some size; one that is cut out lies on another."""
    image = _opened(rng.choice(rng.choice(photos)))
    if image.mode == "RGBA":
        image = _laid(rng, image, photos)
    width, height = image.size
    part_x, part_y = (1.0 if rng.random() < 0.4 else rng.uniform(0.35, 1.0) for _ in range(2))
    wide, high = max(16, int(width * part_x)), max(16, int(height * part_y))
    left, top = rng.randint(0, max(0, width - wide)), rng.randint(0, max(0, height - high))
    part = image.crop((left, top, left + wide, top + high))
    # A part of a clear sky is what mote calls an empty picture.
    image = part if max(ImageStat.Stat(part).stddev) > _LEAST_DEVIATION else image
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    scale = rng.uniform(200, 1000) / max(image.size)
    image = image.resize((max(32, int(image.width * scale)), max(32, int(image.height * scale))))
    if rng.random() < 0.1:
        image = image.convert("L").convert("RGB")
    if rng.random() < 0.4:
        image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.5, 1.4))
        image = ImageEnhance.Contrast(image).enhance(rng.uniform(0.6, 1.4))
        image = ImageEnhance.Color(image).enhance(rng.uniform(0.3, 1.6))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 2.5))) if rng.random() < 0.1 else image


def _opened(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        has_alpha = opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info
        return opened.convert("RGBA" if has_alpha else "RGB")


def _laid(rng: Random, item: Image.Image, photos: list[list[Path]]) -> Image.Image:
    """The picture with transparent parts, and perhaps others, on one colour, on a texture or on a photograph."""
    draw = rng.random()
    if draw < 0.35:
        # As large as the thing itself: on an empty ground it must fill much of the picture.
        ground = Image.new("RGBA", item.size, (*_colour(rng), 255))
        return Image.alpha_composite(ground, item).convert("RGB")
    ground = texture(rng) if draw < 0.6 else _opened(rng.choice(rng.choice(photos))).convert("RGB")
    for other in range(rng.choice((1, 1, 2, 3))):
        thing = item
        if other:
            thing = _opened(rng.choice(rng.choice(photos)))
            if thing.mode != "RGBA":
                continue
        scale = rng.uniform(0.3, 1.0) * min(ground.width / thing.width, ground.height / thing.height)
        thing = thing.resize((max(8, int(thing.width * scale)), max(8, int(thing.height * scale))))
        place = rng.randint(0, ground.width - thing.width), rng.randint(0, ground.height - thing.height)
        ground.paste(thing, place, thing)
    return ground


def screenshot(rng: Random) -> Image.Image:
    """Windows, lists, charts and pages full of text."""
    width, height = _size(rng)
    dark = rng.random() < 0.4
    paper = tuple(rng.randint(10, 50) for _ in range(3)) if dark else tuple(rng.randint(225, 255) for _ in range(3))
    image = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(image)
    ink = tuple(rng.randint(170, 255) for _ in range(3)) if dark else tuple(rng.randint(0, 90) for _ in range(3))
    kind = rng.choice(("page", "window", "chart", "code", "table"))
    font = load_font(rng.choice(font_paths() or ("",)), max(9, int(height / rng.uniform(18, 45))))
    line = int(font.getbbox("Ag")[3] * rng.uniform(1.15, 1.7))
    if kind in ("window", "code") or rng.random() < 0.3:
        draw.rectangle((0, 0, width, line * 2), fill=_colour(rng))
    if kind == "window":
        draw.rectangle((0, line * 2, width // 4, height), fill=_colour(rng))
    left = width // 3 if kind == "window" else rng.randint(4, width // 6)
    if kind == "chart":
        _draw_chart(rng, draw, width, height, ink)
        return image
    y = line * 2 + 4
    while y < height - line:
        indent = rng.randint(0, 4) * line if kind == "code" else 0
        count = rng.randint(2, 14)
        text = " ".join(rng.choice(WORDS) for _ in range(count))
        colour = _colour(rng) if kind == "code" and rng.random() < 0.4 else ink
        draw.text((left + indent, y), text, fill=colour, font=font)
        if kind == "table":
            draw.line((left, y + line - 2, width - left, y + line - 2), fill=ink)
        y += line * (2 if rng.random() < 0.12 else 1)
    return image


def noise(rng: Random) -> Image.Image:
    """White or coloured noise, of one grain or of many."""
    width, height = _size(rng)
    if rng.random() < 0.4:
        grain = rng.choice((1, 1, 2, 4, 8))
        made = np.random.default_rng(rng.getrandbits(32)).integers(
            0, 256, (max(2, height // grain), max(2, width // grain), 3), dtype=np.uint8
        )
        image = Image.fromarray(made).resize((width, height), Image.Resampling.NEAREST)
        return image.convert("L").convert("RGB") if rng.random() < 0.3 else image
    return Image.fromarray(_fractal(rng, width, height, rng.uniform(0.3, 2.2)))


def texture(rng: Random) -> Image.Image:
    """Cells, waves, bricks or marble in a palette.

    Clouds are not among them: the ground of a scene may be clouds, and a scene with nothing on its ground is known.
    """
    width, height = _size(rng)
    kind = rng.choice(("cells", "waves", "bricks", "marble"))
    if kind == "marble":
        y, x = np.mgrid[0:height, 0:width].astype(np.float32) / max(width, height)
        turn, bend = rng.uniform(0, 2 * np.pi), _field(rng, width, height, rng.uniform(1.6, 2.2))
        bend = bend / max(1e-6, float(bend.std())) * rng.uniform(0.5, 2.5)
        field = np.sin((x * np.cos(turn) + y * np.sin(turn)) * rng.uniform(10, 90) + bend)
    elif kind == "waves":
        field = _field(rng, width, height, rng.uniform(1.8, 2.6))
        field = np.sin(field / max(1e-6, float(field.std())) * rng.uniform(3, 16))
    elif kind == "cells":
        field = _cells(rng, width, height)
    else:
        image = Image.new("RGB", (width, height), _colour(rng))
        draw = ImageDraw.Draw(image)
        high, wide, base = rng.randint(12, 60), rng.randint(24, 120), _colour(rng)
        for row, y in enumerate(range(0, height, high)):
            for x in range(-wide if row % 2 else -wide // 2, width, wide):
                shade = tuple(min(255, max(0, part + rng.randint(-30, 30))) for part in base)
                draw.rectangle((x + 2, y + 2, x + wide - 2, y + high - 2), fill=shade)
        return image
    field = (field - field.min()) / max(1e-6, float(np.ptp(field)))
    stops = np.array([_colour(rng) for _ in range(rng.randint(2, 5))], np.float32)
    at = field * (len(stops) - 1)
    low = np.minimum(at.astype(np.int64), len(stops) - 2)
    part = (at - low)[..., None]
    return Image.fromarray((stops[low] * (1 - part) + stops[low + 1] * part).astype(np.uint8))


def painting(rng: Random) -> Image.Image:
    """Strokes, blots and outlines over one another."""
    width, height = _size(rng)
    image = (
        Image.fromarray(_fractal(rng, width, height, 2.0))
        if rng.random() < 0.5
        else Image.new("RGB", (width, height), _colour(rng))
    )
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(25, 250)):
        x, y = rng.randint(0, width), rng.randint(0, height)
        reach = rng.randint(8, max(9, min(width, height) // 3))
        points = [(x + rng.randint(-reach, reach), y + rng.randint(-reach, reach)) for _ in range(rng.randint(2, 6))]
        if rng.random() < 0.6:
            draw.line(points, fill=_colour(rng), width=rng.randint(1, 14), joint="curve")
        elif len(points) > 2:
            draw.polygon(points, fill=_colour(rng))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 3))) if rng.random() < 0.5 else image


DRAWN: tuple[Callable[[Random], Image.Image], ...] = (screenshot, noise, texture, painting)


def unknown(rng: Random, photos: list[list[Path]]) -> Image.Image:
    """One picture of any kind; photographs are the half of them, where there are any, and each group is as frequent."""
    if photos and rng.random() < 0.55:
        return photograph(rng, photos)
    # What is printed is the hardest to tell from what mote reads.
    return rng.choices(DRAWN, (3, 1, 1, 1))[0](rng)


def _size(rng: Random) -> tuple[int, int]:
    side = rng.uniform(_LEAST_SIDE * 2, _MOST_SIDE)
    ratio = rng.uniform(0.5, 2.0) ** 0.5
    return max(_LEAST_SIDE, int(side * ratio)), max(_LEAST_SIDE, int(side / ratio))


def _colour(rng: Random) -> tuple[int, int, int]:
    return rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)


def _field(rng: Random, width: int, height: int, steepness: float) -> np.ndarray:
    """Noise whose amplitude falls with its frequency to the power of `steepness`."""
    wide, high = min(width, 320), min(height, 320)
    random = np.random.default_rng(rng.getrandbits(32))
    frequency = np.hypot(np.fft.fftfreq(high)[:, None], np.fft.rfftfreq(wide)[None, :])
    frequency[0, 0] = 1.0
    waves = np.fft.rfft2(random.standard_normal((high, wide))) / frequency**steepness
    waves[0, 0] = 0.0
    field = np.fft.irfft2(waves, (high, wide)).astype(np.float32)
    return np.asarray(Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC))


def _fractal(rng: Random, width: int, height: int, steepness: float) -> np.ndarray:
    parts = [_field(rng, width, height, steepness) for _ in range(3)]
    if rng.random() < 0.5:
        parts = [parts[0] * 0.7 + part * 0.3 for part in parts]
    made = np.stack(parts, 2)
    low, high = np.percentile(made, (1, 99))
    return (np.clip((made - low) / max(1e-6, high - low), 0, 1) * 255).astype(np.uint8)


def _cells(rng: Random, width: int, height: int) -> np.ndarray:
    """The distance to the nearest of some points."""
    points = [(rng.uniform(0, 160), rng.uniform(0, 160)) for _ in range(rng.randint(15, 120))]
    y, x = np.mgrid[0:160, 0:160].astype(np.float32)
    nearest = np.min([np.hypot(x - a, y - b) for a, b in points], axis=0).astype(np.float32)
    return np.asarray(Image.fromarray(nearest).resize((width, height)))


def _draw_chart(rng: Random, draw: ImageDraw.ImageDraw, width: int, height: int, ink: tuple[int, ...]) -> None:
    left, bottom = width // 8, height - height // 8
    draw.line((left, height // 10, left, bottom, width - left // 2, bottom), fill=ink, width=2)
    count = rng.randint(4, 24)
    step = (width - 2 * left) / count
    for _ in range(rng.randint(1, 4)):
        colour = _colour(rng)
        tops = [rng.randint(height // 10, bottom) for _ in range(count)]
        if rng.random() < 0.5:
            draw.line([(left + (i + 0.5) * step, y) for i, y in enumerate(tops)], fill=colour, width=3)
        else:
            for i, y in enumerate(tops):
                draw.rectangle((left + i * step + 2, y, left + (i + 0.7) * step + 2, bottom), fill=colour)
    font = load_font(rng.choice(font_paths() or ("",)), max(9, height // 32))
    for i in range(count):
        draw.text((left + i * step, bottom + 4), str(rng.randint(0, 99)), fill=ink, font=font)
