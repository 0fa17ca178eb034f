"""How models say where something is in an image, and what that means in the pixels of the user's image.

A model names places in a grid of its own: thousandths of the image, cells of a coarse grid, or pixels of the image as
it was resized for the model. `Grounding` states that for a family; `AnswerGrounding` is what is known of one request's
images.

Coordinates are continuous: x = 0 is the left edge of an image, x = width its right edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Grounding:
    """How the models of a family point.

    Attributes:
        notation: how an answer writes places, a key of text.grounding.NOTATIONS.
        grid: the number that stands for the right and the bottom edge of the image; 0 if numbers are pixels of the
            image as the model saw it, resized.
        cells: whether a number names a cell of the grid, whose middle is meant, and not a line between cells.
        rows_first: whether coordinates come as (y, x).
        traced_by: parts of prompts that make a model answer with polygons in place of boxes.
        names_images: whether the notation says which of several images is meant.
    """

    notation: str
    grid: float
    cells: bool = False
    rows_first: bool = False
    traced_by: tuple[str, ...] = ()
    names_images: bool = False


@dataclass(frozen=True)
class GroundedImage:
    """An image of a request, as the user gave it and as the model saw it.

    Attributes:
        width, height: in pixels, as the user's file holds it.
        orientation: its EXIF orientation, 1 (upright) to 8; the model sees it upright.
        seen: (width, height) of the whole image as the model saw it; None if unknown.
    """

    width: int
    height: int
    orientation: int = 1
    seen: tuple[int, int] | None = None

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height of the upright image."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)

    def in_file(self, point: Point) -> Point:
        """The place in the file's pixels of a point of the upright image."""
        x, y = point
        width, height = self.width, self.height
        return {
            1: (x, y),
            2: (width - x, y),
            3: (width - x, height - y),
            4: (x, height - y),
            5: (y, x),
            6: (y, height - x),
            7: (width - y, height - x),
            8: (width - y, x),
        }[self.orientation]


@dataclass(frozen=True)
class AnswerGrounding:
    """What is needed to read the places in an answer.

    Attributes:
        rules: the family's.
        images: of the request, in order.
        reasoning: how the family writes reasoning, keys of text.reasoning.FORMATS; places are read after its end.
        traces: whether the prompt asks for polygons.
    """

    rules: Grounding
    images: tuple[GroundedImage, ...]
    reasoning: tuple[str, ...] = ()
    traces: bool = False


@dataclass(frozen=True)
class GroundedObject:
    """Something that an answer located in an image, in pixels of the user's image.

    Attributes:
        label: what the answer calls it; empty if it does not.
        image: the image's name, such as "image 1".
        box: (left, top, right, bottom), if the answer gave a box or a polygon.
        points: the points that the answer gave: of a pointing, or the corners of a polygon.
        step: how many pixels (x, y) lie between neighbouring numbers of the model's grid; no coordinate is more exact.
        upright_box, upright_points: the same in the image turned upright, as viewers show it; equal to `box` and
            `points` unless EXIF turns the image.
    """

    label: str
    image: str
    box: tuple[float, float, float, float] | None
    points: tuple[Point, ...]
    step: tuple[float, float]
    upright_box: tuple[float, float, float, float] | None
    upright_points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """The object as plain JSON types."""
        made: dict[str, Any] = {"label": self.label, "image": self.image}
        if self.box is not None:
            made["box"] = list(self.box)
        if self.points:
            made["points"] = [list(point) for point in self.points]
        made["step"] = list(self.step)
        if self.upright_box != self.box or self.upright_points != self.points:
            if self.upright_box is not None:
                made["upright_box"] = list(self.upright_box)
            if self.upright_points:
                made["upright_points"] = [list(point) for point in self.upright_points]
        return made
