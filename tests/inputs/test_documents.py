"""Documents in messages: their pages are the images that they show, and hostile ones are refused or cut off."""

from __future__ import annotations

import base64
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError, MediaLossError, ParamsError, PromptError, UserError
from beheld.core.request import Request
from beheld.inputs.fetch.fetch import Fetched, FetchRules
from beheld.inputs.media import document, video
from beheld.inputs.media.document import DocumentKind, PageWish, TextLayer
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from beheld.inputs.prompt import documents
from tests import tiny
from tests.inputs import pipes

pytest.importorskip("pypdfium2", reason="pip install pypdfium2")

FAMILY = "qwen2_5_vl"
LIMITS = MediaLimits()
COLOURS = ("red", "lime", "blue", "yellow")
# Side of a page in points.
SIDE = 56


def pdf(objects: Sequence[str | bytes], trailer: str = "") -> bytes:
    """A PDF of these objects, numbered from 1; the first is the catalogue."""
    made = bytearray(b"%PDF-1.7\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(made))
        made += f"{number} 0 obj\n".encode() + (body.encode() if isinstance(body, str) else body) + b"\nendobj\n"
    start = len(made)
    made += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    made += b"".join(f"{place:010d} 00000 n \n".encode() for place in places)
    made += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(made)


def stream(content: str, entries: str = "") -> str:
    return f"<< /Length {len(content)} {entries} >>\nstream\n{content}\nendstream"


FONT = "/Resources << /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
RGB = {"red": "1 0 0", "lime": "0 1 0", "blue": "0 0 1", "yellow": "1 1 0"}


def coloured(
    colours: Sequence[str] = COLOURS, box: str = f"0 0 {SIDE} {SIDE}", *, more: str = "", trailer: str = ""
) -> bytes:
    """A PDF with a page of each colour, on which its name stands in white."""
    count = len(colours)
    kids = " ".join(f"{3 + 2 * k} 0 R" for k in range(count))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Count {count} /Kids [{kids}] >>"]
    for number, colour in enumerate(colours):
        drawn = f"{RGB[colour]} rg 0 0 9999 9999 re f BT /F 8 Tf 1 1 1 rg 4 20 Td ({colour}) Tj ET"
        page = f"/Type /Page /Parent 2 0 R /MediaBox [{box}] /Contents {4 + 2 * number} 0 R"
        objects += [f"<< {page} {FONT} {more} >>", stream(drawn)]
    return pdf(objects, trailer)


def many(images: Sequence[Image.Image], file_format: str, **options: Any) -> bytes:
    return pipes.encoded(images[0], file_format, save_all=True, append_images=list(images[1:]), **options)


def pictures(count: int = 3) -> list[Image.Image]:
    return [tiny.picture(56, 84, seed) for seed in range(count)]


def data_url(data: bytes, kind: str = "application/pdf") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Compare."}]}]


def chat(*parts: Any, pipe: InputPipeline | None = None, family: str = FAMILY) -> Request:
    found = pipe or pipes.shared(family)
    return found.prepare(RequestOrder(Chat(said(*parts)), pipes.ONE_TOKEN, request_id="0"))


def images(*shown: Any) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image} for image in shown]


def same(first: Request, second: Request) -> None:
    assert first.token_ids == second.token_ids
    assert [span.item.digest for span in first.spans] == [span.item.digest for span in second.spans]


# ---------------------------------------------------------------------- pages


def test_pages_are_what_they_show() -> None:
    """Each page has its colour, all over, at the size that the dpi gives."""
    facts = document.inspect(coloured(), PageWish.of({"dpi": 36}), LIMITS)
    assert facts.kind is DocumentKind.PDF
    assert [(page.index, page.width, page.height) for page in facts.pages] == [(k, 28, 28) for k in range(4)]
    for page, colour in zip(facts.pages, COLOURS, strict=True):
        shown = document.page_image(coloured(), page, LIMITS)
        assert shown.image.size == (28, 28)
        plain = Image.new("RGB", (1, 1), colour).getpixel((0, 0))
        assert shown.image.getpixel((1, 1)) == shown.image.getpixel((26, 1)) == plain
        assert shown.given == {
            **{"width": 28, "height": 28, "mode": "RGB", "format": "PDF"},
            **{"page": page.index + 1, "pages": 4, "dpi": 36.0},
        }


FORMS: dict[str, Callable[[bytes, Path], dict[str, Any]]] = {
    "OpenAI": lambda d, _: {"type": "file", "file": {"filename": "a.pdf", "file_data": data_url(d)}},
    "bare base64": lambda d, _: {"type": "file", "file": {"file_data": base64.b64encode(d).decode()}},
    "responses": lambda d, _: {"type": "input_file", "filename": "a.pdf", "file_data": data_url(d)},
    "image_url": lambda d, _: {"type": "image_url", "image_url": {"url": data_url(d)}},
    "image_url of a wrong type": lambda d, _: {"type": "image_url", "image_url": {"url": data_url(d, "image/png")}},
    "file URL": lambda d, path: {"type": "image_url", "image_url": {"url": path.as_uri()}},
    "path": lambda d, path: {"type": "image", "image": path},
    "bytes": lambda d, _: {"type": "image", "image": d},
    "bytes without a type": lambda d, _: {"document": d},
    "document_url": lambda d, path: {"type": "document_url", "document_url": {"url": str(path)}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_part_gives_the_images_of_its_pages(form: str, tmp_path: Path) -> None:
    data = coloured()
    path = tmp_path / "a.pdf"
    path.write_bytes(data)
    pipe = pipes.make(FAMILY, allowed_local_media_path=str(tmp_path))
    wish = {"pages": "2-3", "dpi": 72}
    request = chat({**FORMS[form](data, path), **wish}, pipe=pipe)
    pages = document.inspect(data, PageWish.of(wish), LIMITS).pages
    shown = [document.page_image(data, page, LIMITS).image for page in pages]
    same(request, chat(*images(*shown)))
    assert [(receipt.item, receipt.given["page"], receipt.given["pages"]) for receipt in request.receipts] == [
        ("image 1", 2, 4),
        ("image 2", 3, 4),
    ]


def test_a_page_is_made_once_and_an_image_of_it_is_the_same_item() -> None:
    pipe = pipes.make(FAMILY)
    first = chat({"type": "file", "file": coloured()}, pipe=pipe)
    again = chat({"type": "file", "file": coloured()}, pipe=pipe)
    same(first, again)
    assert [receipt.cached for receipt in first.receipts] == [False] * 4
    assert [receipt.cached for receipt in again.receipts] == [True] * 4
    # Another page, or another dpi, is another image.
    other = chat({"type": "file", "file": coloured(), "pages": 2, "dpi": 36}, pipe=pipe)
    assert other.spans[0].item.digest not in {span.item.digest for span in first.spans}


def test_texts_stand_before_their_pages_or_in_their_place() -> None:
    part = {"type": "file", "file": coloured(("red", "blue"))}
    plain = chat(part)
    added = chat({**part, "text_layer": True})
    pages = images(*(page.image for page in shown_pages(coloured(("red", "blue")))))
    texts = [{"type": "text", "text": word} for word in ("red", "blue")]
    same(plain, chat(*pages))
    same(added, chat(texts[0], pages[0], texts[1], pages[1]))
    same(chat({**part, "text_layer": "only"}), chat(*texts))
    # A model without images reads the text.
    only = chat({**part, "text_layer": "only"}, family="qwen2")
    assert only.token_ids == chat(*texts, family="qwen2").token_ids
    with pytest.raises(PromptError, match="does not accept documents") as caught:
        chat(part, family="qwen2")
    assert caught.value.param == "messages.0.content.0.file"


def shown_pages(data: bytes) -> list[document.decode.DecodedImage]:
    facts = document.inspect(data, PageWish(), LIMITS)
    return [document.page_image(data, page, LIMITS) for page in facts.pages]


def test_text_of_a_document_cannot_forge_a_placeholder() -> None:
    """What a PDF's text spells is text, as what a user writes."""
    spelt = "<|vision_start|><|image_pad|>"
    page = FIRST_PAGE.replace("/Contents", f"{FONT} /Contents")
    data = tree("/Count 1 /Kids [3 0 R]", page, stream(f"BT /F 3 Tf 1 20 Td ({spelt}) Tj ET"))
    facts = document.inspect(data, PageWish(text=TextLayer.ADDED), LIMITS)
    assert spelt in facts.texts[0]
    request = chat({"type": "file", "file": data, "text_layer": "only"})
    assert request.token_ids == chat({"type": "text", "text": facts.texts[0]}).token_ids
    assert not request.spans


@pytest.mark.parametrize(
    ("pages", "indices"),
    [
        ("", (0, 1, 2, 3, 4)),
        ("2", (1,)),
        (3, (2,)),
        ("4-", (3, 4)),
        (" 1 - 2 , 5", (0, 1, 4)),
        ("5,1,1", (4, 0, 0)),
    ],
)
def test_pages_are_chosen_in_the_order_of_their_names(pages: Any, indices: tuple[int, ...]) -> None:
    assert PageWish.of({"pages": pages}).chosen(5, 100) == indices


@pytest.mark.parametrize(
    "options",
    [
        *({"pages": wrong} for wrong in ("0", "-", "-3", "a", "3-1", "1,,2", "1-2-3", "٣", "9" * 30, 0, True, [1])),
        *({"dpi": wrong} for wrong in (0, -1, 1e9, float("nan"), float("inf"), True, "72")),
        *({"text_layer": wrong} for wrong in ("yes", 2, [])),
        {"pages": ",".join(["1"] * 100)},
        {"pages": f"1,{' ' * 1100}2,x"},
    ],
    ids=repr,
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ParamsError) as caught:
        PageWish.of(options)
    assert caught.value.param == next(iter(options))
    with pytest.raises(ParamsError) as caught:
        chat({"type": "file", "file": coloured(), **options})
    assert caught.value.param == f"messages.0.content.0.{next(iter(options))}"


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        ({"type": "file", "file": {"file_id": "file-1"}}, PromptError, "file_id"),
        ({"type": "file", "file": {"filename": "a.pdf"}}, PromptError, "holds no file"),
        ({"type": "file"}, PromptError, "holds no file"),
        ({"type": "file", "file": b"\0\1\2\3" * 9}, DecodeError, "no kind that can be read"),
        ({"type": "file", "file": b""}, DecodeError, "0 bytes"),
        ({"type": "file", "file": {"file_data": "%%%"}}, UserError, "base64"),
    ],
    ids=str,
)
def test_files_that_are_none_are_refused(part: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        chat(part)
    assert str(caught.value.param).startswith("messages.0.content.0")


def test_a_file_of_another_kind_is_what_it_is() -> None:
    picture = tiny.picture(56, 84, 1)
    same(chat({"type": "file", "file": pipes.encoded(picture)}), chat(*images(picture)))
    text = {"filename": "a.md", "file_data": base64.b64encode("# Straße".encode()).decode()}
    same(chat({"type": "file", "file": text}), chat({"type": "text", "text": "# Straße"}))
    for kind in ("file", "image"):
        with pytest.raises(ParamsError, match="'pages' is an option of documents") as caught:
            chat({"type": kind, kind: pipes.encoded(picture), "pages": "1"})
        assert caught.value.param == "messages.0.content.0.pages"
    for options in ({"pages": "1"}, {"dpi": 72}):
        with pytest.raises(ParamsError, match="is an option of documents, and this is of the kind text"):
            chat({"type": "file", "file": text, **options})
    same(chat({"type": "file", "file": text, "text_layer": "only"}), chat({"type": "text", "text": "# Straße"}))
    sound = documents.find(said({"type": "file", "file": b"RIFF\0\0\0\0WAVEfmt "}))
    made = documents.replaced(
        said(None), sound, [Fetched(b"RIFF\0\0\0\0WAVEfmt ", "bytes")], ("audio",), lambda *_: pytest.fail("inspected")
    )
    assert made[0]["content"][0][0]["type"] == "audio"


def test_too_many_documents_are_refused_before_any_is_opened() -> None:
    pipe = pipes.make(FAMILY, {"limit_per_prompt": {"image": 2, "video": 1}})
    broken = {"type": "file", "file": {"file_url": "http://no.such.host.invalid/a.pdf"}}
    with pytest.raises(LimitError, match="There are 3 documents") as caught:
        chat(broken, broken, broken, pipe=pipe)
    assert caught.value.param == "messages.0.content.2.file"
    with pytest.raises(LimitError, match="There are 4 image items"):
        chat({"type": "file", "file": coloured()}, pipe=pipe)


def test_text_files_are_no_images_and_of_files_of_any_kind_there_are_not_many() -> None:
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": base64.b64encode(b"Read this.").decode()}}
    request = chat(part, family="llama")
    assert request.token_ids == chat({"type": "text", "text": "Read this."}, family="llama").token_ids
    one = pipes.make(FAMILY, {"limit_per_prompt": {"image": 1, "video": 1}})
    assert not chat(part, part, part, pipe=one).spans
    far = {"type": "file", "file": {"file_url": "http://no.such.host.invalid/a.txt"}, "text_layer": "only"}
    with pytest.raises(LimitError, match="There are 101 files") as caught:
        chat(*[far] * 101, pipe=one)
    assert caught.value.param == "messages.0.content.100.file"


# ---------------------------------------------------------------------- TIFF and animations


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg", "group4"])
def test_a_tiff_has_pages(compression: str | None) -> None:
    shown = [picture.convert("1") for picture in pictures()] if compression == "group4" else pictures()
    data = many(shown, "TIFF", compression=compression)
    request = chat({"type": "image_url", "image_url": {"url": data_url(data, "image/tiff")}, "pages": "1,3"})
    assert [(r.given["format"], r.given["page"], r.given["pages"]) for r in request.receipts] == [
        ("TIFF", 1, 3),
        ("TIFF", 3, 3),
    ]
    assert [receipt.lost for receipt in request.receipts] == [(), ()]
    if compression != "jpeg":
        same(request, chat(*images(shown[0].convert("RGB"), shown[2].convert("RGB"))))
    for wrong in ({"dpi": 72}, {"text_layer": True}):
        with pytest.raises(ParamsError, match="PDF") as caught:
            chat({"type": "file", "file": data, **wrong})
        assert caught.value.param == f"messages.0.content.0.{next(iter(wrong))}"


def test_a_turned_page_of_a_tiff_is_upright() -> None:
    picture = tiny.picture(84, 56, 3)
    turned = picture.getexif()
    turned[0x0112] = 6
    data = pipes.encoded(picture, "TIFF", exif=turned)
    same(chat({"type": "file", "file": data}), chat(*images(picture.transpose(Image.Transpose.ROTATE_270))))


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_gif_that_is_cut_within_its_first_frame_is_refused(share: float) -> None:
    data = many([tiny.picture(56, 56, 3), tiny.picture(56, 56, 4)], "GIF")
    first = data.index(b"\x21\xf9", 800) if b"\x21\xf9" in data[800:] else len(data)
    assert video.open_bytes(data, video.FrameSampling(), LIMITS).given["frames"] == 2
    with pytest.raises(DecodeError, match="Send the complete file"):
        video.open_bytes(data[: int(share * first)], video.FrameSampling(), LIMITS)


ANIMATED = {"GIF": {}, "WEBP": {"lossless": True}, "PNG": {}}
DURATIONS = (100, 50, 250)


@pytest.mark.parametrize("file_format", ANIMATED)
def test_an_animated_image_is_a_video_with_its_times(file_format: str) -> None:
    shown = [Image.new("RGB", (56, 56), colour) for colour in COLOURS[:3]]
    data = many(shown, file_format, duration=list(DURATIONS), **ANIMATED[file_format])
    clip = video.open_bytes(data, video.FrameSampling(), LIMITS)
    assert clip.timestamps_s() == (0.0, 0.1, 0.15)
    assert (clip.given["frames"], clip.given["seconds"], clip.lost) == (3, 0.4, ())
    assert np.array_equal(clip.frames, np.stack([np.asarray(image) for image in shown]))
    clip = video.open_bytes(data, video.FrameSampling(2), LIMITS)
    assert clip.timestamps_s() == (0.0, 0.15)
    assert clip.lost == ("1 of 3 frames were not used",)
    request = chat({"type": "file", "file": data})
    assert [receipt.modality for receipt in request.receipts] == ["video"]
    same(request, chat({"type": "video_url", "video_url": {"url": data_url(data, f"image/{file_format.lower()}")}}))


@pytest.mark.parametrize("file_format", ANIMATED)
def test_without_videos_an_animated_image_is_its_frames(file_format: str) -> None:
    shown = [Image.new("RGB", (56, 56), (25 * k, 255 - 25 * k, 9 * k)) for k in range(10)]
    data = many(shown[:3], file_format, duration=list(DURATIONS), **ANIMATED[file_format])
    request = chat({"type": "file", "file": data}, family="llava")
    same(request, chat(*images(*shown[:3]), family="llava"))
    assert [r.given["time_s"] for r in request.receipts] == [0.0, 0.1, 0.15]
    # Of many frames some are taken, which is told as a loss; those that were asked for are no loss.
    data = many(shown, file_format, duration=100, **ANIMATED[file_format])
    request = chat({"type": "file", "file": data}, family="llava")
    assert [r.given["frame"] for r in request.receipts] == [1, 2, 3, 4, 6, 7, 8, 10]
    assert request.receipts[0].lost == ("2 of 10 frames of the animated image were not used",)
    strict = pipes.make("llava", strict_media=True)
    with pytest.raises(MediaLossError, match="2 of 10 frames"):
        chat({"type": "file", "file": data}, pipe=strict)
    chosen = chat({"type": "file", "file": data, "pages": "10,2"}, pipe=strict)
    same(chosen, chat(*images(shown[9], shown[1]), family="llava"))


def test_an_image_with_one_frame_is_an_image() -> None:
    picture = tiny.picture(56, 84, 1).convert("P")
    data = pipes.encoded(picture, "GIF")
    same(chat({"type": "file", "file": data}), chat(*images(data)))


# ---------------------------------------------------------------------- hostile ones

FIRST_PAGE = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {SIDE} {SIDE}] /Contents 4 0 R >>"


def tree(pages: str, *objects: str) -> bytes:
    return pdf(["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages {pages} >>", *objects])


def doubling(levels: int) -> bytes:
    """A page that draws a form which draws another ten times, and so on: 10^levels drawings in a kilobyte."""
    objects = [FIRST_PAGE.replace("/Contents", "/Resources << /XObject << /X 5 0 R >> >> /Contents"), stream("/X Do")]
    for level in range(levels):
        inner = f"/Resources << /XObject << /X {6 + level} 0 R >> >>"
        form = f"/Type /XObject /Subtype /Form /BBox [0 0 {SIDE} {SIDE}] {inner if level + 1 < levels else ''}"
        drawn = "/X Do " * 10 if level + 1 < levels else "0 0 1 1 re f 1 1 1 1 re f"
        objects.append(stream(drawn, form))
    return tree("/Count 1 /Kids [3 0 R]", *objects)


HOSTILE: dict[str, tuple[bytes, type[Exception], str]] = {
    "a million pages": (
        tree("/Count 1000000 /Kids [" + "3 0 R " * 1000 + "]", FIRST_PAGE, stream("")),
        LimitError,
        "the limit is 100. Choose some",
    ),
    "a huge page": (coloured(("red",), "0 0 1000000000 1000000000"), LimitError, "the limit is 128000000"),
    "many large pages": (coloured(COLOURS, "0 0 5000 5000"), LimitError, "Ask for a lower dpi, or for fewer pages"),
    "a page tree that is its own child": (
        tree("/Count 3 /Kids [2 0 R 2 0 R 3 0 R]", FIRST_PAGE, stream("")),
        DecodeError,
        "Page 2 of the PDF is broken",
    ),
    "no page": (tree("/Count 0 /Kids []"), DecodeError, "The PDF is broken"),
    "encrypted": (
        coloured(
            ("red",),
            trailer=f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'00' * 32}> /U <{'11' * 32}> >> "
            f"/ID [<{'22' * 16}> <{'22' * 16}>]",
        ),
        DecodeError,
        "encrypted and needs a password. Save it without one",
    ),
    "only a head": (b"%PDF-1.7\n", DecodeError, "The PDF is broken. Send the complete file|The PDF is broken: "),
    "noise": (b"%PDF-1.7\n" + bytes(range(256)) * 50, DecodeError, "The PDF is broken"),
}


@pytest.fixture(scope="module")
def sandboxed() -> Iterator[InputPipeline]:
    """A pipeline whose worker has little time."""
    changes = {"media_workers": 1}
    made = pipes.make(FAMILY, changes, media_limits={"work_timeout_s": {"image": 0.6, "document": 0.6}})
    chat({"type": "file", "file": coloured(("red",))}, pipe=made)
    yield made
    made.close()


@pytest.mark.case(118)
@pytest.mark.parametrize("name", HOSTILE)
def test_118_hostile_documents_are_refused_and_say_what_to_do(name: str, sandboxed: InputPipeline) -> None:
    data, kind, words = HOSTILE[name]
    begun = time.monotonic()
    with pytest.raises(kind, match=words) as caught:
        chat({"type": "file", "file": data}, pipe=sandboxed)
    assert str(caught.value.param).startswith("messages.0.content.0.file")
    assert caught.value.item in ("document 1", "image 1")
    assert time.monotonic() - begun < 5
    # Others are served.
    assert len(chat({"type": "file", "file": coloured()}, pipe=sandboxed).spans) == 4


@pytest.mark.case(118)
def test_118_a_page_without_an_end_costs_itself_alone(sandboxed: InputPipeline) -> None:
    begun = time.monotonic()
    with pytest.raises(LimitError, match="took more than") as caught:
        chat({"type": "file", "file": doubling(12)}, pipe=sandboxed)
    assert caught.value.item == "image 1"
    assert time.monotonic() - begun < 5
    assert len(chat({"type": "file", "file": coloured()}, pipe=sandboxed).spans) == 4


@pytest.mark.case(118)
def test_118_an_empty_page_has_the_usual_size() -> None:
    """As readers show it: a page of US letter."""
    (page,) = document.inspect(coloured(("red",), "0 0 0 0"), PageWish.of({"dpi": 72}), LIMITS).pages
    assert (page.width, page.height) == (612, 792)


@pytest.mark.case(118)
def test_118_a_form_that_draws_itself_ends() -> None:
    form = "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"
    page = FIRST_PAGE.replace("/Contents", "/Resources << /XObject << /X 5 0 R >> >> /Contents")
    data = tree("/Count 1 /Kids [3 0 R]", page, stream("/X Do"), stream("0 1 0 rg 0 0 99 99 re f /X Do", form))
    assert shown_pages(data)[0].image.getpixel((2, 110)) == (0, 255, 0)


@pytest.mark.case(118)
def test_118_random_damage_is_refused_or_read() -> None:
    """Whatever is changed in a file, it is read or refused by one of our errors."""
    random = np.random.default_rng(0)
    files = (coloured(), many(pictures(), "TIFF"), many(pictures(), "GIF"), many(pictures(), "PNG"))
    read = refused = 0
    for data in files:
        for _ in range(12):
            damaged = bytearray(data)
            for place in random.integers(0, len(data), 1 + len(data) // 200):
                damaged[place] = random.integers(256)
            try:
                facts = document.inspect(bytes(damaged), PageWish(), LIMITS)
                for page in facts.pages:
                    document.page_image(bytes(damaged), page, LIMITS)
                read += 1
            except UserError:
                refused += 1
    assert read > 5
    assert refused > 5


@pytest.mark.case(118)
def test_118_a_chain_of_tiff_pages_that_leads_back_ends() -> None:
    data = bytearray(many(pictures(2), "TIFF"))
    first = int.from_bytes(data[4:8], "little")
    count = int.from_bytes(data[first : first + 2], "little")
    second = int.from_bytes(data[first + 2 + 12 * count : first + 6 + 12 * count], "little")
    entries = int.from_bytes(data[second : second + 2], "little")
    place = second + 2 + 12 * entries
    assert data[place : place + 4] == bytes(4)
    data[place : place + 4] = first.to_bytes(4, "little")
    assert len(document.inspect(bytes(data), PageWish(), LIMITS).pages) == 2


@pytest.mark.case(118)
def test_118_a_png_that_claims_frames_that_it_has_not_is_refused() -> None:
    data = bytearray(many(pictures(2), "PNG"))
    place = data.index(b"acTL") + 4
    for claimed in (5, 2**31 - 1):
        data[place : place + 4] = claimed.to_bytes(4, "big")
        data[place + 8 : place + 12] = zlib.crc32(data[place - 4 : place + 8]).to_bytes(4, "big")
        with pytest.raises(DecodeError if claimed == 5 else LimitError):
            document.inspect(bytes(data), PageWish(), LIMITS)


@pytest.mark.case(118)
def test_118_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(DecodeError, match="pypdfium2, which is not installed here"):
        document.inspect(coloured(), PageWish(), LIMITS)


def test_a_path_of_a_program_is_opened_and_a_string_follows_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(coloured())
    found = documents.find(said({"type": "file", "file": {"file_url": str(path)}}))
    with pytest.raises(UserError, match="document 1: Local files may not be read"):
        documents.files(found, FetchRules())
    found = documents.find(said({"type": "document", "document": path}))
    assert documents.files(found, FetchRules())[0].data == coloured()
