"""Scenes and how they are sampled: the truth that a picture is rendered from and an answer is told from.

Lengths are fractions: positions of the picture's width and height, sizes of the square root of its area (the
processor brings every picture to about the same area, so a size class is a size on the model's grid whatever the
aspect ratio). Every class keeps a margin from its neighbour, so that no truth is a matter of taste.
"""

import colorsys
from dataclasses import dataclass, field
from random import Random

KINDS = ("circle", "square", "triangle", "star", "heart", "cross")
SIZES = {"small": (0.115, 0.14), "medium": (0.2, 0.24), "large": (0.33, 0.4)}
Rgb = tuple[int, int, int]

# Hue in degrees, saturation and value in percent.
COLOURS = {
    "red": ((-6, 6), (80, 100), (75, 100)),
    "orange": ((24, 33), (85, 100), (92, 100)),
    "yellow": ((50, 58), (75, 100), (92, 100)),
    "green": ((105, 140), (60, 100), (45, 85)),
    "blue": ((212, 238), (70, 100), (60, 100)),
    "purple": ((276, 296), (55, 90), (45, 80)),
    "black": ((0, 360), (0, 30), (0, 12)),
    "white": ((0, 360), (0, 4), (94, 100)),
}
LOW, MIDDLE, HIGH = (0.0, 0.28), (0.4, 0.6), (0.72, 1.0)
PLACES = {
    (0, 0): "at the top left",
    (1, 0): "at the top",
    (2, 0): "at the top right",
    (0, 1): "on the left",
    (1, 1): "in the middle",
    (2, 1): "on the right",
    (0, 2): "at the bottom left",
    (1, 2): "at the bottom",
    (2, 2): "at the bottom right",
}


@dataclass(frozen=True)
class Shape:
    """One shape: its names, its centre (fractions of width and height), its extent (of the root of the area)."""

    kind: str
    colour: str
    size: str
    x: float
    y: float
    extent: float
    rgb: Rgb
    angle: float = 0.0
    outline: Rgb | None = None

    @property
    def place(self) -> str:
        """Where it stands, one of the values of PLACES."""
        return PLACES[_cell(self.x), _cell(self.y)]


@dataclass(frozen=True)
class Label:
    """Printed text: em is a fraction of the root of the area, x and y of the centre, plate a colour behind it."""

    text: str
    font: str
    em: float
    x: float
    y: float
    rgb: Rgb
    plate: Rgb | None
    angle: float


@dataclass(frozen=True)
class Background:
    """What lies behind: a kind, the colours that occur in it, and a seed for its details."""

    kind: str
    palette: tuple[Rgb, ...]
    seed: int


@dataclass(frozen=True)
class Scene:
    """A whole picture. Shapes stand in painting order; `told` gives them in the order in which they are told."""

    width: int
    height: int
    background: Background
    shapes: tuple[Shape, ...]
    label: Label | None
    blur: float = 0.0
    grain: float = 0.0
    jpeg: int | None = None
    overlap: tuple[Shape, Shape] | None = None
    told: tuple[Shape, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "told", tuple(sorted(self.shapes, key=lambda shape: shape.x)))


def _cell(value: float) -> int:
    return 0 if value <= LOW[1] else 1 if value < HIGH[0] else 2


def rgb_from_hsv(hue: float, saturation: float, value: float) -> Rgb:
    """8-bit colour from degrees and two fractions."""
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def distance(a: Rgb, b: Rgb) -> float:
    """How different two colours look: RGB distance with weights that follow the mean red; 0 to about 765."""
    mean = (a[0] + b[0]) / 2
    red, green, blue = (first - second for first, second in zip(a, b, strict=True))
    return ((2 + mean / 256) * red**2 + 4 * green**2 + (2 + (255 - mean) / 256) * blue**2) ** 0.5


def sample_rgb(rng: Random, colour: str) -> Rgb:
    """Some shade of the named colour."""
    hue, saturation, value = (rng.uniform(*bounds) for bounds in COLOURS[colour])
    return rgb_from_hsv(hue, saturation / 100, value / 100)


def sample_background(rng: Random) -> Background:
    """A background of any kind, from white paper to coloured texture."""
    kind = rng.choices(("plain", "gradient", "noise", "stripes", "checks", "texture"), (30, 20, 9, 12, 5, 24))[0]
    tone = rng.random()
    count = {"plain": 1, "noise": 1, "texture": 3}.get(kind, 2)
    base_hue = rng.uniform(0, 360)
    palette = []
    for _ in range(count):
        hue = base_hue + rng.gauss(0, 50)
        if tone < 0.35:
            colour = (hue, rng.uniform(0, 0.3), rng.uniform(0.75, 1))
        elif tone < 0.55:
            colour = (hue, rng.uniform(0, 0.6), rng.uniform(0, 0.35))
        else:
            colour = (hue, rng.uniform(0.05, 0.9), rng.uniform(0.25, 0.95))
        palette.append(rgb_from_hsv(*colour))
    if kind == "plain" and rng.random() < 0.25:
        palette = [rng.choice([(255, 255, 255), (0, 0, 0), (128, 128, 128), (240, 240, 240)])]
    if kind == "gradient":
        palette.append(tuple((a + b) // 2 for a, b in zip(*palette, strict=True)))
    return Background(kind, tuple(palette), rng.getrandbits(32))


def _stands_out(rgb: Rgb, background: Background, least: float) -> bool:
    return all(distance(rgb, other) >= least for other in background.palette)


def _coordinate(rng: Random, half: float) -> float | None:
    """A coordinate inside one of the three bands, at least `half` from both edges; None where none fits."""
    bands = []
    for low, high in (LOW, MIDDLE, HIGH):
        low, high = max(low, half + 0.015), min(high, 1 - half - 0.015)
        if low <= high:
            bands.append((low, high))
    return rng.uniform(*rng.choice(bands)) if bands else None


def sample_shape(rng: Random, background: Background, width: int, height: int, sizes: tuple[str, ...]) -> Shape | None:
    """One shape that stands out from the background and lies wholly inside; None where chance was unkind."""
    colour = rng.choice(tuple(COLOURS))
    rgb = sample_rgb(rng, colour)
    if not _stands_out(rgb, background, 140):
        return None
    size = rng.choice(sizes)
    extent = rng.uniform(*SIZES[size])
    root = (width * height) ** 0.5
    x = _coordinate(rng, extent * root / width / 2 * 1.08)
    y = _coordinate(rng, extent * root / height / 2 * 1.08)
    if x is None or y is None:
        return None
    outline = None
    if rng.random() < 0.12:
        outline = (0, 0, 0) if sum(rgb) > 200 else (255, 255, 255)
    angle = rng.uniform(-12, 12) if rng.random() < 0.6 else 0.0
    return Shape(rng.choice(KINDS), colour, size, x, y, extent, rgb, angle, outline)


def gap(a: Shape, b: Shape, width: int, height: int) -> float:
    """Distance between the circles around two shapes, in roots of the area; negative where the circles meet."""
    root = (width * height) ** 0.5
    dx, dy = (a.x - b.x) * width / root, (a.y - b.y) * height / root
    return (dx * dx + dy * dy) ** 0.5 - 0.56 * (a.extent + b.extent)


def fits(shape: Shape, others: list[Shape], width: int, height: int) -> bool:
    """Whether a further shape is told apart from the others: by name, by order from the left, by distance."""
    for other in others:
        if (shape.kind, shape.colour) == (other.kind, other.colour):
            return False
        if abs(shape.x - other.x) < 0.06 or gap(shape, other, width, height) < 0.02:
            return False
    return True


def overlaps_clearly(under: Shape, over: Shape, width: int, height: int) -> bool:
    """Whether `over` covers a clear part of `under`, yet leaves most of it to be seen."""
    if (under.kind, under.colour) == (over.kind, over.colour) or abs(under.x - over.x) < 0.06:
        return False
    if under.colour == over.colour or distance(under.rgb, over.rgb) < 150 or over.extent > under.extent * 1.3:
        return False
    reach = gap(under, over, width, height) / (0.56 * (under.extent + over.extent)) + 1
    return 0.55 <= reach <= 0.72


def sample_shapes(
    rng: Random, background: Background, width: int, height: int, count: int, want_overlap: bool
) -> tuple[list[Shape], tuple[Shape, Shape] | None] | None:
    """`count` shapes in painting order and the overlapping pair (over, under); None where they did not fit."""
    shapes: list[Shape] = []
    overlap = None
    sizes = tuple(SIZES) if count < 4 else ("small", "medium")
    for _ in range(60 + 40 * count):
        if len(shapes) == count:
            return shapes, overlap
        shape = sample_shape(rng, background, width, height, sizes)
        if shape is None:
            continue
        if want_overlap and len(shapes) == 1:
            if overlaps_clearly(shapes[0], shape, width, height):
                overlap = (shape, shapes[0])
                shapes.append(shape)
        elif fits(shape, shapes, width, height):
            shapes.append(shape)
    return (shapes, overlap) if len(shapes) == count else None


def sample_canvas(rng: Random, largest: int) -> tuple[int, int]:
    """Width and height: about 100 to `largest` pixels, aspect ratio from 1:3 to 3:1."""
    ratio = rng.choice((1.0, 4 / 3, 3 / 2, 16 / 9)) if rng.random() < 0.5 else 3 ** rng.random()
    ratio = ratio if rng.random() < 0.6 else 1 / ratio
    root = 110 * (largest / 110) ** rng.random()
    width, height = root * ratio**0.5, root / ratio**0.5
    shrink = min(1.0, 2000 / max(width, height))
    return max(64, round(width * shrink)), max(64, round(height * shrink))
