"""Paints a scene: background, shapes, text, then the wear of real pictures (blur, grain, JPEG)."""

import io
import math
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.mote.fonts import load_font
from training.mote.scene import Background, Label, Rgb, Scene, Shape

_POOL_SIDE = 512


def render(scene: Scene) -> Image.Image:
    """The scene as an RGB picture; the same scene and the same fonts give the same pixels."""
    image = paint_background(scene.background, scene.width, scene.height)
    for shape in scene.shapes:
        paint_shape(image, shape)
    if scene.label is not None:
        paint_label(image, scene.label)
    return wear(image, scene.blur, scene.grain, scene.jpeg, scene.background.seed)


def wear(image: Image.Image, blur: float, grain: float, jpeg: int | None, seed: int) -> Image.Image:
    """Blur (radius in pixels), grain (standard deviation in 8-bit steps) and JPEG of a quality, as far as asked."""
    if blur:
        image = image.filter(ImageFilter.GaussianBlur(blur))
    if grain:
        noise = _noise(seed, image.width, image.height) * np.float32(grain)
        image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    if jpeg:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=jpeg)
        image = Image.open(buffer).convert("RGB")
    return image


@lru_cache(maxsize=1)
def _noise_pool() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((_POOL_SIDE, _POOL_SIDE, 3)).astype(np.float32)


def _noise(seed: int, width: int, height: int) -> np.ndarray:
    """Unit noise (height, width, 3), cut out of one pool that is laid as tiles: drawing it anew is ten times slower."""
    top, left = seed % _POOL_SIDE, seed // _POOL_SIDE % _POOL_SIDE
    pool = np.roll(_noise_pool(), (-top, -left), (0, 1))
    repeats = (-(-height // _POOL_SIDE), -(-width // _POOL_SIDE), 1)
    return (pool if repeats == (1, 1, 1) else np.tile(pool, repeats))[:height, :width]


def paint_background(background: Background, width: int, height: int) -> Image.Image:
    """The background alone, as an RGB picture."""
    rng = Random(background.seed)
    if background.kind == "gradient":
        return _gradient(rng, background.palette, width, height)
    if background.kind == "texture":
        return _texture(rng, background.palette, width, height)
    image = Image.new("RGB", (width, height), background.palette[0])
    if background.kind == "noise":
        pixels = np.asarray(image) + _noise(background.seed, width, height) * np.float32(rng.uniform(4, 20))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if background.kind in ("stripes", "checks"):
        _stripes(rng, image, background.palette[1], background.kind == "checks")
    return image


def _gradient(rng: Random, palette: tuple[Rgb, ...], width: int, height: int) -> Image.Image:
    """A plane from one colour to the other in any direction, or a spot of one in the other."""
    y, x = np.mgrid[0:32, 0:32].astype(np.float32) / 31
    if rng.random() < 0.3:
        ramp = np.hypot(x - rng.random(), y - rng.random())
    else:
        angle = rng.uniform(0, 2 * math.pi)
        ramp = x * math.cos(angle) + y * math.sin(angle)
    ramp = (ramp - ramp.min()) / (ramp.max() - ramp.min())
    first, second = np.array(palette[0], np.float32), np.array(palette[1], np.float32)
    small = first + (second - first) * ramp[..., None]
    return Image.fromarray(small.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _texture(rng: Random, palette: tuple[Rgb, ...], width: int, height: int) -> Image.Image:
    """Clouds, grass or stone: noise at several scales, coloured along the palette, as in an unsharp photograph."""
    draws = np.random.default_rng(rng.getrandbits(32))
    field = np.zeros((128, 128), np.float32)
    weight = 1.0
    fade = rng.uniform(0.35, 0.75)
    for cells in (3, 6, 12, 24, 48, 96):
        shape = (cells, max(2, round(cells * rng.uniform(0.4, 1))))
        octave = Image.fromarray(draws.random(shape, np.float32))
        field += weight * np.asarray(octave.resize((128, 128), Image.Resampling.BICUBIC))
        weight *= fade
    field = (field - field.min()) / (field.max() - field.min())
    stops = np.array(palette, np.float32)
    place = field * (len(stops) - 1)
    index = np.minimum(place.astype(int), len(stops) - 2)
    part = (place - index)[..., None]
    small = stops[index] * (1 - part) + stops[index + 1] * part
    return Image.fromarray(small.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _stripes(rng: Random, image: Image.Image, colour: Rgb, checks: bool) -> None:
    """Stripes of the second colour, straight or oblique; checks are stripes both ways."""
    draw = ImageDraw.Draw(image)
    width, height = image.size
    step = max(6, round((width * height) ** 0.5 * rng.uniform(0.05, 0.2)))
    if checks:
        for row, top in enumerate(range(0, height, step)):
            for left in range(row % 2 * step, width, 2 * step):
                draw.rectangle((left, top, left + step - 1, top + step - 1), fill=colour)
        return
    slope = rng.choice((0.0, 0.0, 1.0, -1.0, 0.4))
    thick = max(2, round(step * rng.uniform(0.3, 0.6)))
    if rng.random() < 0.5:
        lean = slope * height
        for start in range(-round(abs(lean)), width + round(abs(lean)), step):
            draw.line((start, 0, start + lean, height), fill=colour, width=thick)
    else:
        lean = slope * width
        for start in range(-round(abs(lean)), height + round(abs(lean)), step):
            draw.line((0, start, width, start + lean), fill=colour, width=thick)


@lru_cache(maxsize=8)
def outline_points(kind: str) -> tuple[tuple[float, float], ...]:
    """Corners of a shape about its centre, inside the unit circle's square: both coordinates from -0.5 to 0.5."""
    if kind == "square":
        return ((-0.42, -0.42), (0.42, -0.42), (0.42, 0.42), (-0.42, 0.42))
    if kind == "triangle":
        return tuple((0.52 * math.sin(turn), 0.08 - 0.52 * math.cos(turn)) for turn in (0, 2.0944, 4.18879))
    if kind == "star":
        points = []
        for corner in range(10):
            radius = 0.54 if corner % 2 == 0 else 0.22
            turn = corner * math.pi / 5
            points.append((radius * math.sin(turn), 0.03 - radius * math.cos(turn)))
        return tuple(points)
    if kind == "cross":
        arm, reach = 0.16, 0.48
        quarter = ((-arm, -reach), (arm, -reach), (arm, -arm))
        return tuple(_turned(point, turns) for turns in range(4) for point in quarter)
    assert kind == "heart"
    points = []
    for step in range(40):
        turn = step * math.pi / 20
        x = 16 * math.sin(turn) ** 3
        y = 13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)
        points.append((x / 34, -(y + 2.5) / 34))
    return tuple(points)


def _turned(point: tuple[float, float], quarters: int) -> tuple[float, float]:
    x, y = point
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def shape_mask(shape: Shape, side: int) -> Image.Image:
    """The shape as a smooth 8-bit mask of `side` pixels square, which holds it at 1 / 1.15 of its size."""
    fine = side * (4 if side < 120 else 2)
    mask = Image.new("L", (fine, fine), 0)
    draw = ImageDraw.Draw(mask)
    scale, middle = fine / 1.15, fine / 2
    if shape.kind == "circle":
        draw.ellipse((middle - scale / 2, middle - scale / 2, middle + scale / 2, middle + scale / 2), fill=255)
    else:
        turn = math.radians(shape.angle)
        cos, sin = math.cos(turn), math.sin(turn)
        points = [
            (middle + scale * (x * cos - y * sin), middle + scale * (x * sin + y * cos))
            for x, y in outline_points(shape.kind)
        ]
        draw.polygon(points, fill=255)
    return mask.reduce(fine // side)


def paint_shape(image: Image.Image, shape: Shape, mask: Image.Image | None = None) -> None:
    """Paint one shape, with its outline where it has one; `mask` spares making it again for each frame of a clip."""
    root = (image.width * image.height) ** 0.5
    side = max(4, round(shape.extent * root * 1.15))
    mask = mask or shape_mask(shape, side)
    left, top = round(shape.x * image.width - side / 2), round(shape.y * image.height - side / 2)
    if shape.outline is not None:
        image.paste(shape.outline, (left, top), mask)
        border = max(1, round(shape.extent * root * 0.035))
        image.paste(shape.rgb, (left, top), mask.filter(ImageFilter.MinFilter(2 * border + 1)))
    else:
        image.paste(shape.rgb, (left, top), mask)


def label_size(label: Label, root: float) -> tuple[int, int]:
    """Width and height in pixels that the text takes in a picture of that root of the area."""
    box = load_font(label.font, max(6, round(label.em * root))).getbbox(label.text)
    return math.ceil(box[2] - box[0]), math.ceil(box[3] - box[1])


def paint_label(image: Image.Image, label: Label) -> None:
    """Print the text, on its plate where it has one, turned by its angle."""
    root = (image.width * image.height) ** 0.5
    em = max(6, round(label.em * root))
    font = load_font(label.font, em)
    box = font.getbbox(label.text)
    pad = round(em * 0.35)
    width, height = math.ceil(box[2] - box[0]) + 2 * pad, math.ceil(box[3] - box[1]) + 2 * pad
    ink = Image.new("L", (width, height), 0)
    ImageDraw.Draw(ink).text((pad - box[0], pad - box[1]), label.text, fill=255, font=font)
    sheet = Image.new("L", (width, height), 255)
    if label.angle:
        ink = ink.rotate(label.angle, Image.Resampling.BICUBIC, expand=True)
        sheet = sheet.rotate(label.angle, Image.Resampling.BICUBIC, expand=True)
    left, top = round(label.x * image.width - ink.width / 2), round(label.y * image.height - ink.height / 2)
    if label.plate is not None:
        image.paste(label.plate, (left, top), sheet)
    image.paste(label.rgb, (left, top), ink)
