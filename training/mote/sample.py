"""Samples whole scenes and clips: how many shapes, what text, how big a picture, how worn."""

from dataclasses import dataclass, replace
from random import Random

from PIL import Image

from training.mote.fonts import font_paths
from training.mote.render import label_size, paint_background, paint_shape, shape_mask, wear
from training.mote.scene import (
    HIGH,
    LOW,
    MIDDLE,
    Background,
    Label,
    Rgb,
    Scene,
    Shape,
    distance,
    fits,
    gap,
    sample_background,
    sample_canvas,
    sample_shape,
    sample_shapes,
)
from training.mote.words import LONGEST, sample_text

_LEAST_EM_PIXELS = 15
_LEAST_EM = 0.06


def sample_scene(rng: Random, kind: str, largest: int = 640) -> Scene:
    """A scene of a kind: "shapes" (1 to 4), "text", "both", "few" (1 or 2 shapes, or a short text) or "nothing"."""
    while True:
        scene = _try_scene(rng, kind, largest)
        if scene is not None:
            return scene


def _try_scene(rng: Random, kind: str, largest: int) -> Scene | None:
    width, height = sample_canvas(rng, largest)
    background = sample_background(rng)
    shapes: list[Shape] = []
    overlap = None
    if kind == "few":
        kind = rng.choices(("few", "text"), (75, 25))[0]
        longest = 8
    else:
        longest = LONGEST
    if kind in ("shapes", "both", "few"):
        count = rng.choice((1, 1, 2)) if kind != "shapes" else rng.choice((1, 2, 2, 3, 3, 4))
        found = sample_shapes(rng, background, width, height, count, count > 1 and rng.random() < 0.4)
        if found is None:
            return None
        shapes, overlap = found
    label = None
    if kind in ("text", "both"):
        label = sample_label(rng, background, width, height, shapes, longest)
        if label is None:
            return None
    root = (width * height) ** 0.5
    # Blur is told in pixels of this picture, but what counts is what is left of it on the model's grid of 290 pixels.
    blur = rng.uniform(0.3, 0.9 if label else 1.5) * root / 290 if rng.random() < 0.2 else 0.0
    if root < 200:
        blur = min(blur, 0.4)
    grain = rng.uniform(2, 14) if rng.random() < 0.2 else 0.0
    jpeg = rng.randint(55 if label else 35, 95) if rng.random() < 0.35 else None
    return Scene(width, height, background, tuple(shapes), label, blur, grain, jpeg, overlap)


def _ink(rng: Random, grounds: tuple[Rgb, ...]) -> Rgb | None:
    for _ in range(20):
        draw = rng.random()
        if draw < 0.3:
            rgb = rng.choice(((0, 0, 0), (255, 255, 255)))
        else:
            rgb = (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
        if all(distance(rgb, ground) > 260 and abs(_luma(rgb) - _luma(ground)) > 70 for ground in grounds):
            return rgb
    return None


def _luma(rgb: Rgb) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


def sample_label(
    rng: Random, background: Background, width: int, height: int, shapes: list[Shape], longest: int
) -> Label | None:
    """Text that is big enough, inside the picture, clear of the shapes and of its ground; None where none was found."""
    root = (width * height) ** 0.5
    busy = background.kind in ("stripes", "checks", "texture")
    plate = None
    if rng.random() < (0.7 if busy else 0.2):
        plate = (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
    rgb = _ink(rng, (plate,) if plate else background.palette)
    if rgb is None:
        return None
    font = rng.choice(font_paths() or ("",))
    text = sample_text(rng, longest)
    least = max(_LEAST_EM, _LEAST_EM_PIXELS / root)
    label = Label(text, font, 0.25, 0.5, 0.5, rgb, plate, rng.uniform(-4, 4) if rng.random() < 0.2 else 0.0)
    full_width, full_height = label_size(label, root)
    most = min(0.35, 0.25 * 0.86 * width / max(full_width, 1), 0.25 * 0.55 * height / max(full_height, 1))
    if most < least:
        return None
    em = least * (most / least) ** rng.random()
    pad = 0.45 * em * root + 2
    text_width, text_height = (side * em / 0.25 for side in (full_width, full_height))
    tilt = 0.07 * text_width if label.angle else 0.0
    for _ in range(12):
        half_x, half_y = (text_width / 2 + pad) / width, (text_height / 2 + pad + tilt / 2) / height
        if half_x > 0.5 or half_y > 0.5:
            return None
        label = replace(label, em=em, x=rng.uniform(half_x, 1 - half_x), y=rng.uniform(half_y, 1 - half_y))
        if all(_clear(shape, label, half_x, half_y, width, height) for shape in shapes):
            return label
    return None


def _clear(shape: Shape, label: Label, half_x: float, half_y: float, width: int, height: int) -> bool:
    """Whether the shape keeps away from the box of the text."""
    root = (width * height) ** 0.5
    reach = 0.6 * shape.extent * root
    dx = max(0.0, abs(shape.x - label.x) - half_x) * width
    dy = max(0.0, abs(shape.y - label.y) - half_y) * height
    return (dx * dx + dy * dy) ** 0.5 > reach


DIRECTIONS = {
    (1, 0): "to the right",
    (-1, 0): "to the left",
    (0, -1): "up",
    (0, 1): "down",
    (1, -1): "up and to the right",
    (-1, -1): "up and to the left",
    (1, 1): "down and to the right",
    (-1, 1): "down and to the left",
}


@dataclass(frozen=True)
class Clip:
    """A short video: one scene without text, of which at most one shape moves, from its place there to `goal`."""

    scene: Scene
    frames: int
    mover: Shape | None
    goal: Shape | None
    pace: str
    direction: str | None

    @property
    def still(self) -> tuple[Shape, ...]:
        """The shapes that stand still, from left to right."""
        return tuple(shape for shape in self.scene.told if shape is not self.mover)


def sample_clip(rng: Random, largest: int = 360) -> Clip:
    """A clip of 4 to 16 frames with 1 to 3 shapes; in one of eight nothing moves."""
    step = rng.choice(tuple(DIRECTIONS)) if rng.random() < 0.88 else None
    others = rng.choice((0, 1, 1, 2)) if step else rng.choice((1, 2))
    while True:
        clip = _try_clip(rng, largest, step, others)
        if clip is not None:
            return clip


def _try_clip(rng: Random, largest: int, step: tuple[int, int] | None, others: int) -> Clip | None:
    width, height = sample_canvas(rng, largest)
    if max(width, height) > 2.1 * min(width, height):
        return None
    background = sample_background(rng)
    mover, goal, direction = None, None, None
    shapes: list[Shape] = []
    if step is not None:
        moved = _sample_mover(rng, background, width, height, step)
        if moved is None:
            return None
        mover, goal = moved
        direction = DIRECTIONS[step]
        shapes.append(mover)
    count = others + len(shapes)
    for _ in range(60):
        if len(shapes) >= count:
            break
        shape = sample_shape(rng, background, width, height, ("medium", "large"))
        if shape is None or any(shape.colour == other.colour for other in shapes):
            continue
        if fits(shape, shapes, width, height) and _off_path(shape, mover, goal, width, height):
            shapes.append(shape)
    if len(shapes) < count:
        return None
    grain = rng.uniform(2, 8) if rng.random() < 0.15 else 0.0
    jpeg = rng.randint(50, 95) if rng.random() < 0.3 else None
    scene = Scene(width, height, background, tuple(shapes), None, 0.0, grain, jpeg)
    pace = rng.choice(("even", "even", "ease", "late"))
    return Clip(scene, rng.randint(4, 16), mover, goal, pace, direction)


def _sample_mover(
    rng: Random, background: Background, width: int, height: int, step: tuple[int, int]
) -> tuple[Shape, Shape] | None:
    """A shape at its start and at its goal, at least one band of nine away in every direction that it moves in."""
    shape = sample_shape(rng, background, width, height, ("medium", "large"))
    if shape is None:
        return None
    root = (width * height) ** 0.5
    ends = []
    for move, length in zip(step, (width, height), strict=True):
        half = shape.extent * root / length * 0.56 + 0.01
        if move == 0:
            start = end = rng.uniform(*rng.choice((LOW, MIDDLE, HIGH)))
            end = min(max(end + rng.uniform(-0.02, 0.02), 0), 1)
        else:
            first, last = rng.choice(((LOW, MIDDLE), (MIDDLE, HIGH), (LOW, HIGH), (LOW, HIGH)))
            start, end = rng.uniform(*first), rng.uniform(*last)
            if end - start < 0.26:
                return None
            if move < 0:
                start, end = end, start
        if not (half <= start <= 1 - half and half <= end <= 1 - half) or not (_told(start) and _told(end)):
            return None
        ends.append((start, end))
    (x0, x1), (y0, y1) = ends
    return replace(shape, x=x0, y=y0), replace(shape, x=x1, y=y1)


def _told(value: float) -> bool:
    return any(low <= value <= high for low, high in (LOW, MIDDLE, HIGH))


def _off_path(shape: Shape, mover: Shape | None, goal: Shape | None, width: int, height: int) -> bool:
    if mover is None or goal is None:
        return True
    if abs(shape.x - goal.x) < 0.06:
        return False
    for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        here = replace(mover, x=mover.x + part * (goal.x - mover.x), y=mover.y + part * (goal.y - mover.y))
        if gap(shape, here, width, height) < 0.01:
            return False
    return True


def render_clip(clip: Clip) -> list[Image.Image]:
    """The frames of a clip as RGB pictures of one size."""
    scene = clip.scene
    ground = paint_background(scene.background, scene.width, scene.height)
    for shape in clip.still:
        paint_shape(ground, shape)
    mask = None
    if clip.mover is not None:
        side = max(4, round(clip.mover.extent * (scene.width * scene.height) ** 0.5 * 1.15))
        mask = shape_mask(clip.mover, side)
    frames = []
    for index in range(clip.frames):
        frame = ground.copy()
        if clip.mover is not None and clip.goal is not None:
            part = _progress(index / (clip.frames - 1), clip.pace)
            x = clip.mover.x + part * (clip.goal.x - clip.mover.x)
            y = clip.mover.y + part * (clip.goal.y - clip.mover.y)
            paint_shape(frame, replace(clip.mover, x=x, y=y), mask)
        frames.append(wear(frame, scene.blur, scene.grain, scene.jpeg, scene.background.seed + index * 977))
    return frames


def _progress(time: float, pace: str) -> float:
    if pace == "ease":
        return time * time * (3 - 2 * time)
    if pace == "late":
        return max(0.0, (time - 0.25) / 0.75)
    return time
