"""PDFs through every API's own client: the same pages, the same answer, and refusals in the client's words."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from beheld.core.config import MediaLimits
from beheld.inputs.media import document
from beheld.inputs.media.document import PageWish
from tests.inputs import pipes
from tests.inputs.servers import Server, plain
from tests.inputs.test_documents import HOSTILE, coloured, data_url
from tests.server.running import Running

pytest.importorskip("pypdfium2", reason="pip install pypdfium2")

PDF = coloured(("red", "lime", "blue"))
DATA = data_url(PDF)
ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def pages(dpi: float = 144) -> list[Image.Image]:
    wish = PageWish.of({"dpi": dpi, "pages": "1-2"})
    found = document.inspect(PDF, wish, MediaLimits()).pages
    return [document.page_image(PDF, page, MediaLimits()).image for page in found]


def chat(running: Running, *parts: Any) -> Any:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Compare."}]}]
    return running.post("/v1/chat/completions", {"messages": messages, **ASK})


@pytest.fixture(scope="module")
def expected(running: Running) -> tuple[str, int]:
    """The answer to the pages as images, and the tokens of its prompt."""
    urls = [data_url(pipes.encoded(page), "image/png") for page in pages()]
    body = chat(running, *({"type": "image_url", "image_url": {"url": url}} for url in urls)).json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"filename": "a.pdf", "file_data": DATA}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": base64.b64encode(PDF).decode(), "file_id": None}},
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "image_url", "image_url": DATA},
    ],
    ids=["file", "bare", "image_url", "plain image_url"],
)
def test_a_document_in_chat_is_its_pages(running: Running, expected: tuple[str, int], part: Any) -> None:
    body = chat(running, {**part, "pages": "1-2"}).json()
    assert (body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]) == expected
    assert [(item["item"], item["given"]["page"], item["given"]["pages"]) for item in body["media"]] == [
        ("image 1", 1, 3),
        ("image 2", 2, 3),
    ]


def test_a_document_in_a_response_is_its_pages(running: Running, expected: tuple[str, int]) -> None:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as client:
        file: Any = {"type": "input_file", "filename": "a.pdf", "file_data": DATA, "pages": "1-2"}
        content: Any = [file, {"type": "input_text", "text": "Compare."}]
        asked: Any = [{"role": "user", "content": content}]
        found = client.responses.create(model="tiny", input=asked, temperature=0, max_output_tokens=8)
        assert found.usage is not None
        assert (found.output_text, found.usage.input_tokens) == expected
        file["file_data"] = data_url(HOSTILE["encrypted"][0])
        with pytest.raises(openai.BadRequestError, match="Save it without one") as caught:
            client.responses.create(model="tiny", input=asked)
        assert caught.value.body["param"] == "input.0.content.0"  # type: ignore[index]


def test_a_document_in_a_message_is_its_pages(running: Running, expected: tuple[str, int]) -> None:
    with anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0) as client:
        source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(PDF).decode()}
        block: Any = {"type": "document", "source": source, "pages": "1-2", "citations": {"enabled": False}}
        asked: Any = [{"role": "user", "content": [block, {"type": "text", "text": "Compare."}]}]
        found = client.messages.create(model="tiny", max_tokens=8, messages=asked, extra_body={"temperature": 0})
        assert [part.text for part in found.content if part.type == "text"] == [expected[0]]
        usage = found.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected[1]
        assert client.messages.count_tokens(model="tiny", messages=asked).input_tokens == expected[1]
        source["data"] = base64.b64encode(PDF[:60]).decode()
        with pytest.raises(anthropic.BadRequestError, match="The PDF is broken"):
            client.messages.create(model="tiny", max_tokens=8, messages=asked)
        # Text that is a document, and what is said of one, is text.
        plain: Any = {
            **{"type": "document", "title": "A", "context": "B"},
            "source": {"type": "text", "media_type": "text/plain", "data": "C"},
        }
        inner = [{"type": "text", "text": "C"}]
        split: Any = {**plain, "source": {"type": "content", "content": inner}}
        texts: Any = [{"type": "text", "text": text} for text in ("A\nB", "C")]
        counts = [
            client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": content}]).input_tokens
            for content in ([plain], [split], texts)
        ]
        assert counts[0] == counts[1] == counts[2]
        for whole in (plain, split):
            asked = [{"role": "user", "content": [{**whole, "pages": "2"}]}]
            with pytest.raises(anthropic.BadRequestError, match="pages needs a document with pages"):
                client.messages.count_tokens(model="tiny", messages=asked)


def test_a_document_is_fetched_and_known_by_its_bytes(
    running: Running, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    server = Server(plain(PDF))
    for part in (
        {"type": "file", "file": {"file_url": server.url()}},
        {"type": "image_url", "image_url": {"url": server.url("/a.pdf")}},
    ):
        body = chat(running, {**part, "pages": "1-2"}).json()
        assert (body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]) == expected
        assert [item["given"]["source"] for item in body["media"]] == ["url", "url"]
    # Where nothing says that it is a document, the error does.
    refused = chat(running, {"type": "image_url", "image_url": {"url": server.url("/a")}})
    assert refused.status_code == 400
    assert "part of the type 'file'" in refused.json()["error"]["message"]
    server.close()


@pytest.mark.parametrize(
    ("part", "status", "param", "words"),
    [
        ({"file": {"file_data": data_url(HOSTILE["encrypted"][0])}}, 400, "file", "encrypted"),
        ({"file": {"file_data": data_url(HOSTILE["only a head"][0])}}, 400, "file", "broken"),
        ({"file": {"file_data": data_url(HOSTILE["a million pages"][0])}}, 413, "file", "Choose some"),
        ({"file": {"file_data": DATA}, "pages": "4"}, 400, "pages", "Name pages from 1 to 3"),
        ({"file": {"file_data": DATA}, "pages": "x"}, 400, "pages", "Write for example"),
        ({"file": {"file_data": DATA}, "dpi": 0}, 400, "dpi", "from 1 to 1200"),
        ({"file": {"file_data": data_url(HOSTILE["a huge page"][0])}, "dpi": 9}, 413, "file", "Ask for a lower dpi"),
        ({"file": {"file_id": "file-1"}}, 400, "file.file_id", "Send its file_data"),
        ({"file": {"filename": "a.pdf"}}, 400, "file", "holds no file"),
        ({"file": {"file_data": "data:application/pdf;base64,%%"}}, 400, "file", "base64"),
        ({"file": {"file_data": DATA}, "max_pixels": 4}, 400, "max_pixels", "unknown"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
@pytest.mark.case(118)
def test_118_refusals_say_what_to_do(running: Running, part: Any, status: int, param: str, words: str) -> None:
    refused = chat(running, {"type": "file", **part})
    error = refused.json()["error"]
    assert refused.status_code == status, error
    assert words in error["message"] + str(error.get("remedy")), error
    assert error["param"].startswith("messages.0.content.0"), error
    assert error["param"].endswith(param) or param == "file", error


def test_an_animated_image_is_a_video_for_a_model_that_takes_one(running: Running) -> None:
    buffer = io.BytesIO()
    shown = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue", "lime")]
    shown[0].save(buffer, "WEBP", save_all=True, append_images=shown[1:], duration=[100, 50, 250], lossless=True)
    url = data_url(buffer.getvalue(), "image/webp")
    as_file = chat(running, {"type": "file", "file": {"file_data": url}}).json()
    as_video = chat(running, {"type": "video_url", "video_url": {"url": url}}).json()
    assert as_file["media"][0]["used"]["timestamps_s"] == [0.0, 0.1, 0.15]
    assert as_file["choices"][0]["message"] == as_video["choices"][0]["message"]
    assert as_file["usage"]["prompt_tokens"] == as_video["usage"]["prompt_tokens"]
