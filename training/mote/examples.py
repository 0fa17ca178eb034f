"""Draws the example pictures and the example clip: python -m training.mote.examples FOLDER."""

import argparse
from dataclasses import replace
from pathlib import Path

import av
from PIL import Image

from training.mote.fonts import font_paths
from training.mote.render import render
from training.mote.sample import Clip, render_clip
from training.mote.scene import Background, Label, Rgb, Scene, Shape

RED, BLUE, GREEN, YELLOW = (220, 30, 30), (30, 70, 210), (30, 150, 60), (250, 215, 20)
PURPLE, ORANGE = (130, 40, 165), (250, 130, 10)
_PAPER = Background("gradient", ((250, 248, 240), (225, 232, 240), (237, 240, 240)), 5)
_SLATE = Background("plain", ((64, 72, 84),), 1)
FRAMES_PER_SECOND = 8


def _shape(kind: str, colour: str, size: str, x: float, y: float, rgb: Rgb, angle: float = 0.0) -> Shape:
    extent = {"small": 0.128, "medium": 0.22, "large": 0.365}[size]
    return Shape(kind, colour, size, x, y, extent, rgb, angle)


def _font(name: str) -> str:
    """The font of that file name, or Pillow's own."""
    return next((path for path in font_paths() if Path(path).name == name), "")


def scenes() -> dict[str, Scene]:
    """The example pictures by file name."""
    circle = _shape("circle", "red", "large", 0.25, 0.27, RED)
    square = _shape("square", "blue", "small", 0.8, 0.8, BLUE)
    star = _shape("star", "green", "large", 0.5, 0.5, GREEN, 6.0)
    heart = _shape("heart", "yellow", "medium", 0.22, 0.24, YELLOW)
    triangle = _shape("triangle", "purple", "large", 0.77, 0.74, PURPLE)
    sign = Label("OPEN 24/7", _font("DejaVuSans-Bold.ttf"), 0.17, 0.5, 0.5, (255, 255, 255), (20, 90, 60), 0.0)
    wood = Background("texture", ((170, 130, 90), (190, 150, 110), (150, 112, 76)), 11)
    return {
        "scene.png": Scene(640, 480, _PAPER, (circle, square), None),
        "two_pictures_a.png": Scene(480, 480, _PAPER, (star,), None),
        "two_pictures_b.png": Scene(640, 400, _PAPER, (heart, triangle), None),
        "sign.png": Scene(640, 420, wood, (), sign),
    }


def clip() -> Clip:
    """The example clip: an orange star passes above a blue square."""
    star = _shape("star", "orange", "medium", 0.18, 0.25, ORANGE)
    square = _shape("square", "blue", "medium", 0.5, 0.78, (60, 120, 255))
    scene = Scene(320, 240, _SLATE, (star, square), None)
    return Clip(scene, 16, star, replace(star, x=0.82), "even", "to the right")


def write_video(frames: list[Image.Image], path: Path) -> None:
    """Encode RGB frames of one size as H.264 in an MP4 file."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, scene in scenes().items():
        # A palette keeps the files small; the few colours of these scenes lose nothing that counts.
        render(scene).quantize(128).save(folder / name, optimize=True)
    write_video(render_clip(clip()), folder / "motion.mp4")


if __name__ == "__main__":
    main()
