"""Known pictures as others draw them with Pillow: one thing on a plain ground, in pure colours, of any size.

The renderer's own scenes have soft edges, classes of sizes and mixed colours; a user's drawing has none of these. The
truth is a Scene, so that the same questions are asked about it.
"""

from dataclasses import replace
from random import Random

from PIL import Image, ImageDraw, ImageFont

from training.mote.render import outline_points
from training.mote.sample import sample_scene
from training.mote.scene import COLOURS, KINDS, SIZES, Background, Rgb, Scene, Shape, distance, rgb_from_hsv

GROUNDS: tuple[Rgb, ...] = (
    *((255, 255, 255),) * 4,
    *((0, 0, 0), (128, 128, 128), (240, 240, 240), (30, 30, 30), (200, 200, 200), (245, 245, 220), (230, 240, 255)),
    *((0, 0, 128), (0, 128, 128), (255, 228, 225), (135, 206, 235), (60, 90, 60), (250, 250, 210), (90, 140, 200)),
)
PURE: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 20, 20), (200, 0, 0), (210, 30, 30)),
    "orange": ((255, 140, 0), (255, 128, 0), (255, 130, 20)),
    "yellow": ((255, 230, 0), (255, 220, 0), (250, 220, 40)),
    "green": ((0, 128, 0), (0, 160, 0), (0, 200, 0), (34, 139, 34), (30, 140, 60)),
    "blue": ((0, 0, 255), (30, 60, 200), (0, 0, 200), (40, 70, 220)),
    "purple": ((128, 0, 128), (120, 40, 160), (140, 30, 170)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (250, 250, 250)),
}
_LEAST_DISTANCE = 150.0


def draw_plainly(rng: Random) -> tuple[Scene, Image.Image]:
    """A drawing and what it shows: mostly one shape, else two, a text, or nothing."""
    width = rng.choice((64, 96, 128, 200, 224, 256, 320, 400, 512, 640, 800))
    height = round(width * rng.choice((1.0, 1.0, 1.0, 0.75, 0.75, 1.33, 0.56, 1.5)))
    ground = rng.choice(GROUNDS) if rng.random() < 0.8 else _any(rng)
    kind = rng.choices(("one", "two", "text", "nothing"), (64, 14, 12, 10))[0]
    background = Background("plain", (ground,), rng.getrandbits(32))
    scene = Scene(width, height, background, (), None)
    # Some draw larger and make it smaller, which softens the edges.
    fine = rng.choice((1, 1, 1, 2, 4))
    image = Image.new("RGB", (width * fine, height * fine), ground)
    if kind == "text":
        scene = _write(rng, scene, image)
    elif kind != "nothing":
        scene = replace(scene, shapes=tuple(_shapes(rng, width, height, ground, 1 if kind == "one" else 2)))
        for shape in scene.shapes:
            _draw(rng, image, shape, fine)
    if fine > 1:
        image = image.resize((width, height), rng.choice((Image.Resampling.BOX, Image.Resampling.LANCZOS)))
    return scene, image


def _any(rng: Random) -> Rgb:
    return rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)


def _ink(rng: Random, ground: Rgb) -> tuple[str, Rgb]:
    while True:
        name = rng.choice(tuple(COLOURS))
        hue, saturation, value = COLOURS[name]
        mixed = rgb_from_hsv(rng.uniform(*hue), rng.uniform(*saturation) / 100, rng.uniform(*value) / 100)
        rgb = rng.choice(PURE[name]) if rng.random() < 0.75 else mixed
        if distance(rgb, ground) > _LEAST_DISTANCE:
            return name, rgb


def _shapes(rng: Random, width: int, height: int, ground: Rgb, count: int) -> list[Shape]:
    root, made = (width * height) ** 0.5, list[Shape]()
    for number in range(count):
        colour, rgb = _ink(rng, ground)
        size = rng.choice(tuple(SIZES))
        most = 0.9 * min(width, height) / root / count
        extent = min(most, rng.uniform(*SIZES[size]) if rng.random() < 0.55 else rng.uniform(0.15, 0.85))
        size = min(SIZES, key=lambda name: abs(sum(SIZES[name]) / 2 - extent))
        half_x, half_y = extent * root / width / 2, extent * root / height / 2
        # Two stand side by side.
        left, right = number / count, (number + 1) / count
        centred = rng.random() < 0.5
        x = (left + right) / 2 if centred else rng.uniform(min(left + half_x, 0.5), max(right - half_x, 0.5))
        y = 0.5 if centred else rng.uniform(half_y, 1 - half_y)
        made.append(Shape(rng.choice(KINDS), colour, size, x, y, extent, rgb))
    return made


def _draw(rng: Random, image: Image.Image, shape: Shape, fine: int) -> None:
    draw, root = ImageDraw.Draw(image), (image.width * image.height) ** 0.5
    half, x, y = shape.extent * root / 2, shape.x * image.width, shape.y * image.height
    edge = None if rng.random() < 0.75 else rng.choice(((0, 0, 0), (255, 255, 255), (60, 60, 60)))
    thick = rng.randint(1, 4) * fine
    box = (x - half, y - half, x + half, y + half)
    if shape.kind == "circle":
        draw.ellipse(box, fill=shape.rgb, outline=edge, width=thick)
    elif shape.kind == "square":
        draw.rectangle(box, fill=shape.rgb, outline=edge, width=thick)
    else:
        points = [(x + 2 * half * px, y + 2 * half * py) for px, py in outline_points(shape.kind)]
        if shape.kind == "triangle":
            points = [(x - half, y + half), (x + half, y + half), (x, y - half)]
        draw.polygon(points, fill=shape.rgb, outline=edge, width=thick if edge else 1)


def _write(rng: Random, scene: Scene, image: Image.Image) -> Scene:
    """Print a text in Pillow's own font."""
    label = None
    while label is None or len(label.text) > 14:
        label = sample_scene(rng, "text", 320).label
    _, rgb = _ink(rng, scene.background.palette[0])
    em = rng.uniform(0.08, 0.18) * min(image.width, image.height)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(max(9, round(em)))
    left, top, right, bottom = draw.textbbox((0, 0), label.text, font=font)
    if right > 0.95 * image.width:
        font = ImageFont.load_default(max(8, em * 0.95 * image.width / right))
        left, top, right, bottom = draw.textbbox((0, 0), label.text, font=font)
    x, y = (rng.uniform(0.02, 0.98) * max(0, side) for side in (image.width - right, image.height - bottom))
    draw.text((x, y), label.text, fill=rgb, font=font)
    centre = (x + (left + right) / 2) / image.width, (y + (top + bottom) / 2) / image.height
    return replace(scene, label=replace(label, rgb=rgb, plate=None, angle=0.0, x=centre[0], y=centre[1]))
