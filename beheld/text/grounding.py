"""Reads the places that an answer names, and gives them in pixels of the user's image.

Each notation has a reader, which finds labels and numbers in an answer's text. JSON with usual names is read in every
family, too: that is how an answer guided by a schema looks. The text itself is left as it is.

Readers pass over a text once: the text comes from a model, and may be anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.grounding import AnswerGrounding, GroundedImage, GroundedObject, Point
from beheld.core.media import item_name
from beheld.text.reasoning import FORMATS

# Objects of one answer; more are not read.
_MAX_OBJECTS = 10_000
_MAX_DEPTH = 64
_DIGITS = 3
_NUMBER = re.compile(r"-?\d{1,7}(?:\.\d{1,9})?")


@dataclass(frozen=True)
class Located:
    """What an answer located, in the model's numbers.

    Attributes:
        label: what it is called.
        numbers: coordinates, two for each point, in the order in which they are written.
        is_box: whether they are two opposite corners of a box; otherwise they are points.
        image: the number of the image, from 1, if the notation says it.
        is_named: whether each number is named x or y, so that the family's order says nothing.
    """

    label: str
    numbers: tuple[float, ...]
    is_box: bool
    image: int | None = None
    is_named: bool = False


Reader = Callable[[str, bool], Iterator[Located]]


def read(text: str, known: AnswerGrounding, prompt: str | None = None) -> list[GroundedObject]:
    """Return what an answer located, in the order of its text.

    Args:
        text: the answer with its special tokens.
        known: the family's rules, and the request's images.
        prompt: the prompt's text, which may have opened the reasoning.
    """
    text = _answered(text, known, prompt)
    made: list[GroundedObject] = []
    for located in _located(text, known):
        # An answer about several images that does not say which of them it means is not guessed at.
        number = (1 if len(known.images) == 1 else 0) if located.image is None else located.image
        if not 1 <= number <= len(known.images) or len(made) == _MAX_OBJECTS:
            continue
        found = _placed(located, number, known)
        if found is not None:
            made.append(found)
    return made


def _answered(text: str, known: AnswerGrounding, prompt: str | None) -> str:
    """What follows the reasoning; nothing if the answer ended within it."""
    for name in known.reasoning:
        marks = FORMATS[name]
        _, closed, after = text.rpartition(marks.close)
        if closed:
            text = after
        elif marks.begins_inside(prompt) or text.lstrip().startswith(marks.open):
            return ""
    return text


def _located(text: str, known: AnswerGrounding) -> Iterator[Located]:
    found = False
    for located in NOTATIONS[known.rules.notation](text, known.traces):
        found = True
        yield located
    if not found and NOTATIONS[known.rules.notation] is not _json:
        yield from _json(text, known.traces)


def _placed(located: Located, number: int, known: AnswerGrounding) -> GroundedObject | None:
    """Return an object in pixels; None if its numbers are no places."""
    image = known.images[number - 1]
    values = located.numbers
    if len(values) < 2 or len(values) % 2 or not all(map(math.isfinite, values)):
        return None
    pairs = list(zip(values[::2], values[1::2], strict=True))
    if known.rules.rows_first and not located.is_named:
        pairs = [(x, y) for y, x in pairs]
    scale = _scale(image, known)
    shift = 0.5 if known.rules.cells else 0.0
    upright = [
        (_within((x + shift) * scale[0], image.upright[0]), _within((y + shift) * scale[1], image.upright[1]))
        for x, y in pairs
    ]
    in_file = [image.in_file(point) for point in upright]
    boxed = located.is_box or len(upright) > 2
    return GroundedObject(
        label=located.label,
        image=item_name("image", number),
        box=_box(in_file) if boxed else None,
        points=() if located.is_box else tuple(map(_rounded, in_file)),
        step=_rounded((scale[1], scale[0]) if image.orientation >= 5 else scale),
        upright_box=_box(upright) if boxed else None,
        upright_points=() if located.is_box else tuple(map(_rounded, upright)),
    )


def _scale(image: GroundedImage, known: AnswerGrounding) -> Point:
    """Return the pixels of the upright image for each number of the model's grid, along x and y."""
    width, height = image.upright
    if known.rules.grid:
        return width / known.rules.grid, height / known.rules.grid
    assert image.seen is not None, "it was not checked that the size is known"
    return width / image.seen[0], height / image.seen[1]


def _within(value: float, most: int) -> float:
    return min(max(value, 0.0), float(most))


def _rounded(point: Point) -> Point:
    return round(point[0], _DIGITS), round(point[1], _DIGITS)


def _box(points: Sequence[Point]) -> tuple[float, float, float, float]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, top = _rounded((min(xs), min(ys)))
    right, bottom = _rounded((max(xs), max(ys)))
    return left, top, right, bottom


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in _NUMBER.findall(text))


def _groups(numbers: Sequence[float], size: int) -> Iterator[tuple[float, ...]]:
    for start in range(0, len(numbers) - size + 1, size):
        yield tuple(numbers[start : start + size])


# ---------------------------------------------------------------------- JSON

_BOXES = ("bbox_2d", "box_2d", "bbox", "box", "bounding_box", "boundingBox")
_POINTS = ("point_2d", "point", "points", "keypoint", "keypoints", "center", "click")
_LABELS = ("label", "name", "object", "class", "category", "text_content", "text", "description", "sub_label")
_SIDES = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"), ("left", "top", "right", "bottom"))
_FENCED = re.compile(r"```(?:json)?([^`]*)(?:```|$)")
_DECODER = json.JSONDecoder()
_FLAT = re.compile(r"\{[^{}]*\}")


def _json(text: str, traces: bool) -> Iterator[Located]:
    """Objects with a box or a point under a usual name, as `{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}`."""
    pieces = _FENCED.findall(text) if "```" in text else [text]
    for piece in pieces:
        if "[" not in piece and "{" not in piece:
            continue
        value = _whole(piece)
        # The text is no single JSON value: a list that was cut off, or several. Its complete objects are read.
        values = [_parsed(flat) for flat in _FLAT.findall(piece)] if value is None else [value]
        for value in values:
            yield from _walked(value)


def _whole(piece: str) -> Any:
    """The one JSON value of a text, which may have words or special tokens around it; None if there is none."""
    begin = next(place for place, letter in enumerate(piece) if letter in "[{")
    try:
        value, end = _DECODER.raw_decode(piece, begin)
    except (ValueError, RecursionError):
        return None
    return None if "[" in piece[end:] or "{" in piece[end:] else value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _walked(value: Any, depth: int = 0) -> Iterator[Located]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        for entry in value:
            yield from _walked(entry, depth + 1)
    if not isinstance(value, Mapping):
        return
    label = next((value[name] for name in _LABELS if isinstance(value.get(name), str)), "")
    for name, inner in value.items():
        if name in _BOXES:
            yield from (Located(label, place, is_box=True, is_named=named) for place, named in _coordinates(inner, 4))
        elif name in _POINTS:
            yield from (Located(label, place, is_box=False, is_named=named) for place, named in _coordinates(inner, 2))
        else:
            yield from _walked(inner, depth + 1)
    for sides in _SIDES:
        if all(_is_number(value.get(side)) for side in sides):
            yield Located(label, tuple(float(value[side]) for side in sides), is_box=True, is_named=True)


def _coordinates(value: Any, size: int) -> Iterator[tuple[tuple[float, ...], bool]]:
    """The numbers of one place, or of each of several: lists, or objects with names of coordinates; whether named."""
    if isinstance(value, Mapping):
        for names in (*_SIDES, ("x", "y")):
            if len(names) == size and all(_is_number(value.get(name)) for name in names):
                yield tuple(float(value[name]) for name in names), True
                return
    if not isinstance(value, list) or not value:
        return
    if all(map(_is_number, value)):
        if len(value) == size:
            yield tuple(map(float, value)), False
        return
    for entry in value:
        if isinstance(entry, list) and len(entry) == size and all(map(_is_number, entry)):
            yield tuple(map(float, entry)), False
        elif isinstance(entry, Mapping):
            yield from _coordinates(entry, size)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e7


# ---------------------------------------------------------------------- marks around labels and numbers


def _marked(ref: tuple[str, str], box: tuple[str, str]) -> Reader:
    """A label between marks, then one box or more between marks, each with two corners."""
    opened, closed = map(re.escape, ref)
    begun, ended = map(re.escape, box)
    # Marks begin with "<", and neither labels nor numbers hold one.
    token = re.compile(f"{opened}(?P<label>[^<]*){closed}|{begun}(?P<box>[^<]*)(?:{ended}|$)")

    def reader(text: str, traces: bool) -> Iterator[Located]:
        label, end = "", 0
        for found in token.finditer(text):
            if text[end : found.start()].strip():
                # A label belongs to what follows it at once.
                label = ""
            end = found.end()
            if found["label"] is not None:
                label = found["label"].strip()
            else:
                for numbers in _groups(_numbers(found["box"]), 4):
                    yield Located(label, numbers, is_box=True)

    return reader


_LISTED = re.compile(r"\[\s*(-?\d{1,7}(?:\.\d{1,9})?(?:\s*,\s*-?\d{1,7}(?:\.\d{1,9})?){1,3})\s*\]")


def _bare_lists(text: str, traces: bool) -> Iterator[Located]:
    """Lists of four or two numbers: `[[x1, y1, x2, y2]]`, `[x, y]`; and JSON."""
    found = False
    for located in _json(text, traces):
        found = True
        yield located
    if found:
        return
    for numbers in map(_numbers, _LISTED.findall(text)):
        if len(numbers) in (2, 4):
            yield Located("", numbers, is_box=len(numbers) == 4)


_FOUR_LOCS = re.compile(r"((?:<loc\d{4}>){4})(?:<seg\d{3}>)*([^<;]*)")


def _locs_then_label(text: str, traces: bool) -> Iterator[Located]:
    """`<loc0100><loc0200><loc0300><loc0400> cat ; ...`: y1, x1, y2, x2 and then the label."""
    for locs, label in _FOUR_LOCS.findall(text):
        yield Located(label.strip(), _numbers(locs), is_box=True)


_RUN_OF_LOCS = re.compile(r"(?:<loc_\d{1,4}>)+")
_TAGS = re.compile(r"<[^<>]*>")


def _label_then_locs(text: str, traces: bool) -> Iterator[Located]:
    """`cat<loc_100><loc_200><loc_300><loc_400>`: the label and then one box or more, or a polygon."""
    end = 0
    for found in _RUN_OF_LOCS.finditer(text):
        label, numbers = _TAGS.sub("", text[end : found.start()]).strip(), _numbers(found[0])
        end = found.end()
        if traces or len(numbers) % 4:
            yield Located(label, numbers[: len(numbers) // 2 * 2], is_box=False)
        else:
            yield from (Located(label, box, is_box=True) for box in _groups(numbers, 4))


_POINT_TAG = re.compile(r"<points?\b([^<>]*)>([^<]*)")
_AXIS = re.compile(r'\b([xy])(\d{0,4})\s*=\s*"\s*(\d{1,4}(?:\.\d{1,4})?)\s*"')
_NAMED = re.compile(r'\balt\s*=\s*"([^"]*)"')
_COORDS = re.compile(r'\bcoords\s*=\s*"([^"]*)"')
_TRIPLE = 3


def _point_tags(text: str, traces: bool) -> Iterator[Located]:
    """`<point x="10" y="20" alt="cat">cat</point>` and `<points x1="10" y1="20" x2="30" y2="40" ...>`."""
    for attributes, inner in _POINT_TAG.findall(text):
        named = _NAMED.search(attributes)
        # A label is no place for coordinates.
        placed = _NAMED.sub("", attributes)
        values: dict[str, dict[str, float]] = {}
        for axis, number, value in _AXIS.findall(placed):
            values.setdefault(number, {})[axis] = float(value)
        label = (named[1] if named else inner).strip()
        for both in values.values():
            if len(both) == 2:
                yield Located(label, (both["x"], both["y"]), is_box=False)


def _point_lists(text: str, traces: bool) -> Iterator[Located]:
    """`<points coords="1 1 410 433 2 520 433">cat</points>`: the image's number; of each point its number, x, y."""
    for attributes, inner in _POINT_TAG.findall(text):
        coords = _COORDS.search(attributes)
        for one in re.split(r"[\t:;,]", coords[1]) if coords else ():
            image, *numbers = _numbers(one) or (0.0,)
            for _, x, y in _groups(numbers, _TRIPLE):
                yield Located(inner.strip(), (x, y), is_box=False, image=int(image))


NOTATIONS: Mapping[str, Reader] = {
    "json": _json,
    "lists": _bare_lists,
    "ref box": _marked(("<ref>", "</ref>"), ("<box>", "</box>")),
    "object_ref box": _marked(("<|object_ref_start|>", "<|object_ref_end|>"), ("<|box_start|>", "<|box_end|>")),
    "ref det": _marked(("<|ref|>", "<|/ref|>"), ("<|det|>", "<|/det|>")),
    "locs label": _locs_then_label,
    "label locs": _label_then_locs,
    "point tags": _point_tags,
    "point lists": _point_lists,
}
"""Notation -> its reader."""
