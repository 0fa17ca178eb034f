"""Places in answers: a box that is drawn in a file comes back in the file's pixels, however a model writes it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from beheld.core.grounding import AnswerGrounding, GroundedImage, Grounding
from beheld.core.outputs import TokenEvent
from beheld.core.params import SamplingParams
from beheld.core.request import FinishReason
from beheld.families import registry
from beheld.text.collect import Answer
from beheld.text.grounding import NOTATIONS, read

RULES = {
    package.rpartition(".")[2]: family.grounding
    for package, family in registry.families().items()
    if family.grounding is not None
}
Box = tuple[float, float, float, float]


def in_numbers(rules: Grounding, image: GroundedImage, point: tuple[float, float]) -> list[str]:
    """A point of the upright image as a model would write it, in its own order."""
    made = []
    for value, side, seen in zip(point, image.upright, image.seen or (0, 0), strict=True):
        scaled = value / side * (rules.grid or seen)
        decimals = 1 if rules.grid == 100 else 0
        cell = min(int(scaled), int(rules.grid) - 1)
        made.append(str(cell) if rules.cells else f"{scaled:.{decimals}f}")
    return made[::-1] if rules.rows_first else made


# Notation -> what writes a label and two corners, each as two numbers.
Writer = Callable[[str, Sequence[str], Sequence[str]], str]
WRITERS: dict[str, Writer] = {
    "json": lambda label, a, b: (
        "```json\n" + json.dumps([{"bbox_2d": [*map(float, (*a, *b))], "label": label}]) + "\n```"
    ),
    "lists": lambda label, a, b: f"The {label}: <|begin_of_box|>[[{', '.join((*a, *b))}]]<|end_of_box|>",
    "ref box": lambda label, a, b: f"<ref>{label}</ref><box>[[{', '.join((*a, *b))}]]</box>",
    "object_ref box": lambda label, a, b: (
        f"<|object_ref_start|>{label}<|object_ref_end|><|box_start|>({','.join(a)}),({','.join(b)})<|box_end|><|im_end|>"
    ),
    "ref det": lambda label, a, b: f"<|ref|>{label}<|/ref|><|det|>[[{', '.join((*a, *b))}]]<|/det|>",
    "locs label": lambda label, a, b: "".join(f"<loc{int(n):04d}>" for n in (*a, *b)) + f" {label}",
    "label locs": lambda label, a, b: f"</s><s>{label}" + "".join(f"<loc_{n}>" for n in (*a, *b)) + "</s>",
    "point tags": lambda label, a, b: (
        f'<points x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" alt="{label}">{label}</points>'
    ),
    "point lists": lambda label, a, b: (
        f'<points coords="1 1 {a[0].zfill(3)} {a[1].zfill(3)} 2 {b[0].zfill(3)} {b[1].zfill(3)}">{label}</points>'
    ),
}


def test_every_notation_of_a_family_has_a_reader_and_a_writer_here() -> None:
    assert {rules.notation for rules in RULES.values()} == set(NOTATIONS) == set(WRITERS)
    assert len(RULES) >= 16


def drawn(width: int, height: int, box: tuple[int, int, int, int], orientation: int) -> tuple[int, int, int, int]:
    """Where a box that is drawn in a file stands in the image that viewers and models see, found by its pixels."""
    image = Image.new("L", (width, height))
    image.paste(255, box)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.info["exif"] = exif.tobytes()
    found = ImageOps.exif_transpose(image).getbbox()
    assert found is not None
    return found


@st.composite
def files(draw: Any) -> tuple[GroundedImage, tuple[int, int, int, int]]:
    """An image of any size and orientation, as the model saw it at any size, and a box in the file."""
    width, height = draw(st.integers(2, 300)), draw(st.integers(2, 300))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    box = (left, top, draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height)))
    seen = draw(st.integers(28, 2000)), draw(st.integers(28, 2000))
    return GroundedImage(width, height, draw(st.integers(1, 8)), seen), box


@pytest.mark.parametrize("family", RULES)
@settings(max_examples=40, deadline=None)
@given(files())
def test_a_box_comes_back_within_half_a_step_of_the_models_grid(
    family: str, file: tuple[GroundedImage, tuple[int, int, int, int]]
) -> None:
    """The bound of every coordinate is half of the distance between two numbers of the grid: what rounding loses."""
    image, box = file
    rules = RULES[family]
    upright = drawn(image.width, image.height, box, image.orientation)
    corners = [in_numbers(rules, image, corner) for corner in (upright[:2], upright[2:])]
    text = WRITERS[rules.notation]("a cat", *corners)
    found = read(text, AnswerGrounding(rules, (image,)))
    label = "" if rules.notation == "lists" else "a cat"
    points = [point for each in found for point in each.points]
    boxes = [each.box for each in found if each.box is not None] or [
        (*map(min, zip(*points, strict=True)), *map(max, zip(*points, strict=True)))
    ]
    assert {each.label for each in found} == {label}
    assert [each.image for each in found] == ["image 1"] * len(found)
    (back,) = boxes
    for value, true, step in zip(back, box, (*found[0].step, *found[0].step), strict=True):
        assert abs(value - true) <= step / 2 + 0.002
        if step <= 1:
            assert abs(value - true) <= 1
    assert all(0 <= x <= image.width and 0 <= y <= image.height for x, y in (back[:2], back[2:]))


SQUARE = GroundedImage(1000, 500, seen=(200, 100))


def located(notation: str, text: str, grid: float = 1000, **more: Any) -> list[tuple[str, Any]]:
    known = AnswerGrounding(Grounding(notation, grid), (SQUARE,), **more)
    return [(each.label, each.box or each.points) for each in read(text, known)]


ANSWERS: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("json", '{"bbox_2d": [100, 200, 300, 400], "label": "cat"}', [("cat", (100, 100, 300, 200))]),
    ("json", '[{"point_2d": [100, 200], "label": "eye"}]', [("eye", ((100, 100),))]),
    # Words around, a list that was cut off, and what is no place.
    (
        "json",
        'Here:\n```json\n[{"bbox_2d": [0, 0, 1000, 1000], "label": "a"}, {"bbox_2d": [1,',
        [("a", (0, 0, 1000, 500))],
    ),
    ("json", '{"box_2d": [1, 2, 3], "label": "a"} {"bbox": "none"} {"point": [true, false]}', []),
    (
        "json",
        '{"bbox_2d": [[0, 0, 10, 10], [10, 10, 20, 20]], "label": "a"}',
        [("a", (0, 0, 10, 5)), ("a", (10, 5, 20, 10))],
    ),
    # As a schema may have it.
    (
        "ref box",
        '{"objects": [{"name": "cat", "box": {"x1": 0, "y1": 0, "x2": 500, "y2": 500}, "score": 1}], "count": 1}',
        [("cat", (0, 0, 500, 250))],
    ),
    ("json", '{"name": "b", "xmin": 0, "ymin": 0, "xmax": 10, "ymax": 20}', [("b", (0, 0, 10, 10))]),
    ("json", '{"points": [{"x": 10, "y": 20}, {"x": 30, "y": 40}]}', [("", ((10, 10),)), ("", ((30, 20),))]),
    # A label belongs to all boxes that follow at once, and to no others.
    (
        "ref box",
        "A <ref>dog</ref><box>(0,0),(10,20)</box><box>(20,20),(30,40)</box> and <box>(0,0),(10,10)</box>",
        [("dog", (0, 0, 10, 10)), ("dog", (20, 10, 30, 20)), ("", (0, 0, 10, 5))],
    ),
    (
        "ref box",
        "<ref>dog</ref><box>[[0, 0, 10, 20], [20, 20, 30, 40]]</box>",
        [("dog", (0, 0, 10, 10)), ("dog", (20, 10, 30, 20))],
    ),
    ("ref det", "<|ref|>a title<|/ref|><|det|>[[0, 0, 500, 500]]<|/det|>\n# A title", [("a title", (0, 0, 500, 250))]),
    ("lists", "It is at [[100, 200, 300, 400]] and [50, 60].", [("", (100, 100, 300, 200)), ("", ((50, 30),))]),
    ("lists", "<|begin_of_box|>42<|end_of_box|>", []),
    ("lists", '[{"label": "car", "bbox_2d": [100, 200, 300, 400]}]', [("car", (100, 100, 300, 200))]),
    ("point tags", '<point x="10.0" y="20.0" alt="x=3">eye</point>', [("x=3", ((10, 10),))]),
    (
        "point tags",
        'Counting the <points x1="1" y1="2" x2="3" y2="4" alt="eyes">eyes</points> shows 2.',
        [("eyes", ((1, 1),)), ("eyes", ((3, 2),))],
    ),
    (
        "point lists",
        '<points coords="1 1 100 200 2 300 400">eyes</points>',
        [("eyes", ((100, 100),)), ("eyes", ((300, 200),))],
    ),
    # The second image is none of this request's.
    ("point lists", '<points coords="2 1 100 200\t1 2 300 400">eyes</points>', [("eyes", ((300, 200),))]),
    (
        "label locs",
        "car<loc_0><loc_0><loc_500><loc_500>dog<loc_1><loc_2><loc_3><loc_4>",
        [("car", (0, 0, 500, 250)), ("dog", (1, 1, 3, 2))],
    ),
    (
        "locs label",
        "<loc0000><loc0000><loc0500><loc0500> cat ; <loc0100><loc0100><loc0200><loc0200><seg001> dog",
        [("cat", (0, 0, 500, 250)), ("dog", (100, 50, 200, 100))],
    ),
    # Nothing at all.
    *((notation, "There is no cat in this picture.", []) for notation in NOTATIONS),
]


@pytest.mark.parametrize(
    ("notation", "text", "expected"),
    ANSWERS,
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_answers_as_models_write_them(notation: str, text: str, expected: list[tuple[str, Any]]) -> None:
    assert located(notation, text) == expected


def test_polygons_are_their_corners_and_what_surrounds_them() -> None:
    rules = Grounding("label locs", 1000, traced_by=("<OCR_WITH_REGION>",))
    text = "word<loc_0><loc_0><loc_100><loc_0><loc_100><loc_100><loc_0><loc_100>"
    (found,) = read(text, AnswerGrounding(rules, (SQUARE,), traces=True))
    assert found.box == (0, 0, 100, 50)
    assert found.points == ((0, 0), (100, 0), (100, 50), (0, 50))
    assert len(read(text, AnswerGrounding(rules, (SQUARE,)))) == 2


def test_places_in_reasoning_are_not_the_answers() -> None:
    text = 'I see {"bbox_2d": [0, 0, 9, 9]}.</think>{"bbox_2d": [0, 0, 10, 20], "label": "a"}'
    assert located("json", text, reasoning=("think",)) == [("a", (0, 0, 10, 10))]


@pytest.mark.parametrize(("prompt", "begin"), [("user: Where? <think>\n", ""), ("user: Where?", "<think>")])
def test_an_answer_that_ended_while_it_reasoned_has_no_places(prompt: str, begin: str) -> None:
    known = AnswerGrounding(Grounding("json", 1000), (SQUARE,), ("think",))
    box = 'I see {"bbox_2d": [0, 0, 9, 9]}.'
    assert read(begin + box, known, prompt) == []
    assert len(read(box, known, "user: Where?")) == 1


@pytest.mark.parametrize("end", ["", "<|im_end|>", " That is all."])
def test_named_numbers_keep_their_label_and_the_order_of_their_names(end: str) -> None:
    """A family that writes rows first does so in lists; an end mark takes no label from an object within another."""
    known = AnswerGrounding(Grounding("json", 1000, rows_first=True), (SQUARE,))
    sides = {"x1": 10, "y1": 20, "x2": 30, "y2": 40}
    for entry in ({"label": "a", "bbox": sides}, {"label": "a", **sides}, {"label": "a", "bbox": [20, 10, 40, 30]}):
        (found,) = read(json.dumps([entry]) + end, known)
        assert (found.label, found.box) == ("a", (10, 10, 30, 20))
    (found,) = read(json.dumps({"label": "a", "point": {"x": 10, "y": 20}}) + end, known)
    assert (found.label, found.points) == ("a", ((10, 10),))


def test_of_several_images_the_answer_says_which() -> None:
    known = AnswerGrounding(Grounding("point lists", 1000, names_images=True), (SQUARE, SQUARE))
    (found,) = read('<points coords="2 1 100 200">a</points>', known)
    assert found.image == "image 2"
    assert read('{"bbox_2d": [0, 0, 10, 20], "label": "a"}', known) == []


def test_numbers_beyond_the_image_end_at_its_edge() -> None:
    assert located("json", '{"bbox_2d": [-5, 10, 5000, 20]}') == [("", (0, 5, 1000, 10))]
    assert located("json", '{"bbox_2d": [1e999, 0, NaN, 1]}') == []


def test_json_has_what_viewers_need_of_a_turned_image() -> None:
    known = AnswerGrounding(Grounding("json", 100), (GroundedImage(40, 20, 6),))
    (found,) = read('{"bbox_2d": [0, 0, 50, 25], "label": "a"}', known)
    assert found.to_json() == {
        "label": "a",
        "image": "image 1",
        "box": [0, 10, 10, 20],
        "step": [0.4, 0.2],
        "upright_box": [0, 0, 10, 10],
    }
    known = AnswerGrounding(Grounding("json", 100), (GroundedImage(40, 20),))
    (found,) = read('{"point_2d": [50, 25]}', known)
    assert found.to_json() == {"label": "", "image": "image 1", "points": [[20, 5]], "step": [0.4, 0.2]}


PIECES = (
    *(
        "<ref>",
        "</ref>",
        "<box>",
        "</box>",
        "[",
        "]",
        "{",
        "}",
        '"',
        "(",
        ")",
        ",",
        ";",
        "```",
        "```json",
        "<",
        ">",
        "\\",
    ),
    *(
        "<loc_1>",
        "<loc_",
        "<loc0001>",
        "<|det|>",
        "<|ref|>",
        "<point ",
        "<points ",
        'coords="',
        "x=",
        "1 ",
        '{"bbox_2d":',
    ),
    *("<|box_start|>", "<|object_ref_start|>", "</point>", "-", "9", "1e", "x1 ", " ", "\t"),
)


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_takes_long(piece: str) -> None:
    """Reading takes time in proportion to the text: 200 thousand letters of any piece are read nine times in 3 s."""
    text = piece * (200_000 // len(piece))
    begun = time.thread_time()
    for notation in NOTATIONS:
        located(notation, text)
    assert time.thread_time() - begun < 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for notation in NOTATIONS:
        for traces in (False, True):
            for _, place in located(notation, text, traces=traces):
                numbers = place if isinstance(place[0], float) else [number for point in place for number in point]
                assert all(0 <= number <= 1000 for number in numbers)


class Tokenizer:
    """A tokenizer of two special tokens and of digits, as far as collectors use one."""

    words = ("<box>", "</box>", "1", "0", ",")
    all_special_ids = (0, 1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(self.words[k] for k in ids if not (skip_special_tokens and k in self.all_special_ids))


def test_marks_that_are_special_tokens_are_read_though_the_text_leaves_them_out() -> None:
    """The ids of an answer are read, not its text."""
    places = AnswerGrounding(Grounding("ref box", 10), (SQUARE,))
    params = SamplingParams(detokenize=False)
    answer = Answer(0, params, Tokenizer(), places=places)
    answer.push(TokenEvent("0", (0, 2, 4, 3, 4, 2)))
    assert answer.output().grounding is None
    answer.push(TokenEvent("0", (3, 4, 2, 1), FinishReason.STOP))
    (found,) = answer.output().grounding or ()
    assert found.box == (100, 0, 1000, 50)
    assert answer.output().text == ""
    delta = answer.delta()
    assert delta is not None
    assert delta.grounding == [found]
