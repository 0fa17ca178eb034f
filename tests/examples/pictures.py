"""Draws the pictures of how-to pages from what beheld answers, so that every number in them is true.

    python -m tests.examples.pictures

Each is an SVG file in docs/how-to/pictures, with light colours of its own: pages are read on the site and elsewhere.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from beheld import LLM, SamplingParams
from beheld.core.grounding import AnswerGrounding, GroundedImage
from beheld.families import registry
from beheld.server import resume
from beheld.text import grounding

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, FOLDER = ROOT / "examples", ROOT / "docs" / "how-to" / "pictures"
# What examples/scene.png shows, in its pixels.
SHAPES = {"circle": (59, 28, 262, 231), "square": (482, 354, 542, 414)}
INK, FAINT, PAPER, MARK, BOX = "#1d1d1b", "#62605a", "#ffffff", "#0b5f58", "#b3261e"


def text(x: float, y: float, words: str, size: int = 13, colour: str = INK, more: str = "") -> str:
    """A line of text that begins at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(words)}</text>'


def code(x: float, y: float, words: str, size: int = 11) -> str:
    """A line of code."""
    return text(x, y, words, size, more=' font-family="ui-monospace, Menlo, Consolas, monospace" xml:space="preserve"')


def framed(x: float, y: float, width: float, height: float, colour: str = FAINT, more: str = "") -> str:
    """The outline of a rectangle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="none" stroke="{colour}"{more}/>'


def arrow(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    """A line with a head at its end."""
    place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {place} stroke="{INK}" marker-end="url(#head)"{more}/>'


def shown(data: bytes, width: float, height: float, more: str = "") -> str:
    """A PNG at the origin."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<image width="{width:g}" height="{height:g}" href="{url}"{more}/>'


def drawing(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    """A whole file."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif"><defs>{head}</defs>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def grounded() -> str:
    """A file that EXIF turns, what the model sees and says, and the boxes in the file."""
    rules = registry.facts(registry.find("qwen2_5_vl")).grounding
    assert rules is not None
    width, height = 640, 480
    seen_height, seen_width = smart_resize(width, height)
    image = GroundedImage(width, height, 6, (seen_width, seen_height))
    # What a model says that sees the shapes where they are, in whole pixels of its view.
    scale_x, scale_y = seen_width / height, seen_height / width
    said = []
    for label, (left, top, right, bottom) in SHAPES.items():
        box = ((height - bottom) * scale_x, left * scale_y, (height - top) * scale_x, right * scale_y)
        said.append({"bbox_2d": [round(value) for value in box], "label": label})
    found = grounding.read(json.dumps(said), AnswerGrounding(rules, (image,)))
    data = (EXAMPLES / "scene.png").read_bytes()
    parts = [
        text(20, 28, "What the model sees and says", more=' font-weight="600"'),
        text(20, 46, f"turned upright by EXIF, resized to {seen_width} × {seen_height}", 11, FAINT),
        f'<g transform="translate(200 60) rotate(90) scale({240 / width:g} {180 / height:g})">'
        f"{shown(data, width, height)}</g>",
        framed(20, 60, 180, 240),
        *(code(216, 84 + 18 * k, line) for k, line in enumerate(_lines(said))),
        arrow(216, 180, 420, 180),
        text(216, 172, "grounding=True", 11, MARK),
        text(440, 28, "Where it is in your file", more=' font-weight="600"'),
        text(440, 46, f"as stored: {width} × {height}, on its side", 11, FAINT),
        f'<g transform="translate(440 60) scale(.5)">{shown(data, width, height)}',
        *(framed(one.box[0], one.box[1], one.box[2] - one.box[0], one.box[3] - one.box[1], BOX, ' stroke-width="4"')
          for one in found if one.box is not None),
        "</g>",
        framed(440, 60, 320, 240),
        *(code(440, 322 + 18 * k, f"{one.label} ({', '.join(f'{edge:.1f}' for edge in one.box)})")
          for k, one in enumerate(found) if one.box is not None),
    ]  # fmt: skip
    return drawing(790, 356, "Boxes of an answer, in the model's view and in the user's file", parts)


def _lines(said: Sequence[dict[str, object]]) -> list[str]:
    """The JSON of an answer, a field on each line."""
    whole = json.dumps(said)
    return whole.replace(', "label"', ',\n  "label"').replace("}, {", "},\n {").splitlines()


def documents() -> str:
    """A PDF of two pages and an animation: what becomes of them, and what mote answers."""
    pages = [EXAMPLES / f"two_pictures_{name}.png" for name in "ab"]
    images = [Image.open(page).convert("RGB") for page in pages]
    file = io.BytesIO()
    images[0].save(file, "PDF", save_all=True, append_images=images[1:])
    frames = [Image.new("RGB", (160, 120), (222, 232, 240)) for _ in range(4)]
    for number, frame in enumerate(frames):
        ImageDraw.Draw(frame).ellipse((15 + 30 * number, 45, 45 + 30 * number, 75), fill=(20, 140, 40))
    film = io.BytesIO()
    frames[0].save(film, "GIF", save_all=True, append_images=frames[1:], duration=[200, 200, 400, 200])
    params = SamplingParams(temperature=0, max_tokens=64)
    asked = (
        ({"type": "file", "file": file.getvalue(), "dpi": 72}, "What is in this picture?"),
        ({"type": "file", "file": film.getvalue()}, "Describe this video."),
    )
    talks = [[{"role": "user", "content": [part, {"type": "text", "text": words}]}] for part, words in asked]
    with LLM(max_model_len=4096, dtype="float32", disable_log_stats=True) as llm:
        read, watched = llm.chat(talks, params, use_tqdm=False)
    parts = [
        text(20, 28, "A PDF is an image for each page", more=' font-weight="600"'),
        text(20, 46, asked[0][1], 11, FAINT),
    ]
    for number, (page, receipt) in enumerate(zip(pages, read.media, strict=True)):
        given, used, left = receipt.given, receipt.used, 20 + 190 * number
        width, height = 170, 170 * given["height"] / given["width"]
        parts += [
            f'<g transform="translate({left} 60)">{shown(page.read_bytes(), width, height)}</g>',
            framed(left, 60, width, height),
            text(left, 250, f"page {given['page']} of {given['pages']}, {given['dpi']:g} dpi", 11),
            text(left, 266, f"{given['width']} × {given['height']}, seen as {used['width']} × {used['height']}", 11),
            text(left, 282, f"{receipt.tokens} tokens", 11),
        ]
    answer = [line for whole in read.outputs[0].text.splitlines() for line in _wrapped(whole, 62)]
    parts += [text(20, 312 + 17 * k, line, 12, MARK) for k, line in enumerate(answer)]
    (receipt,) = watched.media
    parts += [
        text(420, 28, "An animation is a video", more=' font-weight="600"'),
        text(420, 46, asked[1][1], 11, FAINT),
    ]
    for number, (frame, at) in enumerate(zip(frames, receipt.used["timestamps_s"], strict=True)):
        left, top = 420 + 176 * (number % 2), 60 + 110 * (number // 2)
        place = 15 + 30 * number + 15
        parts += [
            f'<g transform="translate({left} {top}) scale(.7)"><rect width="160" height="120" fill="#dee8f0"/>'
            f'<circle cx="{place}" cy="60" r="15" fill="#148c28"/></g>',
            framed(left, top, 0.7 * frame.width, 0.7 * frame.height),
            text(left + 118, top + 14, f"{at:g} s", 11),
        ]
    parts += [
        text(420, 282, f"{receipt.given['format']}, {receipt.used['frames']} frames, {receipt.tokens} tokens", 11),
        text(420, 312, watched.outputs[0].text, 12, MARK),
    ]
    return drawing(790, 370, "Pages of a PDF and frames of an animation, with their receipts and answers", parts)


def _wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def resumed() -> str:
    """A stream that is cut and taken up again."""
    client, server = 150, 600
    parts = [
        text(client - 30, 28, "client", more=' font-weight="600"'),
        text(server - 30, 28, "server", more=' font-weight="600"'),
        f'<line x1="{client}" y1="38" x2="{client}" y2="356" stroke="{FAINT}"/>',
        f'<line x1="{server}" y1="38" x2="{server}" y2="356" stroke="{FAINT}"/>',
        arrow(client, 64, server, 64),
        code(client + 14, 58, "POST /v1/chat/completions   X-Resumable: true"),
        arrow(server, 96, client, 96),
        code(client + 14, 90, "id: stream-0f3c:1   data: ..."),
        arrow(server, 122, client, 122),
        code(client + 14, 116, "id: stream-0f3c:2   data: ..."),
        f'<path d="M{client - 7} 141 l14 14 m0 -14 l-14 14" stroke="{BOX}" stroke-width="2.5"/>',
        text(20, 152, "connection lost", 12, BOX),
        f'<line x1="{server}" y1="148" x2="{client + 90}" y2="148" stroke="{BOX}" stroke-dasharray="4 4"/>',
        framed(server + 12, 132, 172, 104, MARK, ' rx="6"'),
        text(server + 22, 154, "goes on with the answer,", 12, MARK),
        text(server + 22, 172, "and keeps events 3, 4, ...", 12, MARK),
        text(server + 22, 202, f"for {resume.KEPT_S:g} s without", 12, MARK),
        text(server + 22, 220, "a reader", 12, MARK),
        arrow(client, 256, server, 256),
        code(client + 14, 250, "GET /v1/streams/stream-0f3c   Last-Event-ID: stream-0f3c:2"),
        arrow(server, 288, client, 288),
        code(client + 14, 282, "id: stream-0f3c:3   data: ..."),
        arrow(server, 314, client, 314),
        code(client + 14, 308, "id: stream-0f3c:4   data: ..."),
        arrow(server, 340, client, 340),
        code(client + 14, 334, "id: stream-0f3c:5   data: [DONE]"),
    ]
    return drawing(800, 376, "A stream is cut, the server keeps its events, and the client takes it up again", parts)


PICTURES = {"grounding": grounded, "documents": documents, "resume": resumed}


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
