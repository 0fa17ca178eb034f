"""The page at /, used by a real browser: by keyboard, in both themes, on a desk and on a phone."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld.core.grounding import AnswerGrounding, GroundedImage, Grounding
from beheld.server.page import page
from beheld.text.grounding import read
from tests import tiny
from tests.server.browser import CHROMIUM, Browser
from tests.server.running import Running

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
ANSWER = "document.querySelector('.answer .figures')?.textContent.includes('tokens in')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    found = Browser()
    yield found
    found.close()


def keep(browser: Browser, name: str) -> None:
    """Save a picture for people to look at, if they said where."""
    folder = os.environ.get("BEHELD_SCREENSHOTS")
    if folder:
        browser.picture(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("name", ["talk", "dashboard", "routes"])
def test_a_page_needs_nothing_from_outside(name: str) -> None:
    text, policy = page(name).html, page(name).headers["Content-Security-Policy"]
    assert '<link rel="stylesheet' not in text
    assert "<script src" not in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert "http" not in text.replace("http-equiv", "")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", " style="):
        assert way not in text
    assert not re.search(r"<[a-z][^>]* on[a-z]+=", text)
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == text.count("<script>") + text.count("<style>") > 2


@needs_browser
def test_the_page_of_routes_shows_them(browser: Browser, running: Running) -> None:
    browser.open(running.url + "/docs", 360, 720, "light")
    browser.until("document.querySelectorAll('details').length > 20")
    text = browser.run("document.body.textContent")
    assert "/v1/chat/completions" in text
    assert "max_completion_tokens" in text
    assert browser.run("document.documentElement.scrollWidth") <= 360
    keep(browser, "routes")


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("device", "width", "height"), [("desk", 1100, 800), ("phone", 360, 720)])
def test_ask_about_a_picture_by_keyboard(
    running: Running, browser: Browser, tmp_path: Path, theme: str, device: str, width: int, height: int
) -> None:
    file = tmp_path / "shapes.png"
    tiny.picture(320, 240, 3).save(file)
    browser.requests.clear()
    browser.open(running.url + "/", width, height, theme)
    browser.until("document.getElementById('about').textContent.includes('tiny')")
    assert browser.run("document.activeElement.id") == "question"
    browser.give("#files", file)
    browser.until("document.querySelectorAll('#added img').length === 1")
    browser.run("document.getElementById('longest').value = 24")
    browser.run("document.getElementById('question').focus()")
    browser.write("What is it?")
    keep(browser, f"{device}-{theme}-before")
    browser.key("Enter")
    browser.until(ANSWER)
    assert browser.run("document.querySelector('.answer .said').textContent.length") > 0
    assert "image 1" in browser.run("document.querySelector('.answer figcaption').textContent")
    assert browser.run("document.activeElement.id") == "question"
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), "it is wider than the screen"
    browser.run("document.querySelector('.answer details').open = true")
    keep(browser, f"{device}-{theme}-after")
    dark = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((c) => c < 60)")
    assert dark == (theme == "dark")
    assert all(url.startswith((running.url, "data:", "blob:")) for url in browser.requests), browser.requests


@needs_browser
@pytest.mark.parametrize(
    ("modalities", "told"),
    [
        (["image", "video", "audio"], "Drop pictures, a PDF, a video or a sound anywhere"),
        (["image", "video"], "Drop pictures, a PDF or a video anywhere"),
        (["audio"], "Drop a sound anywhere"),
        ([], "Ask a question."),
    ],
)
def test_the_hint_names_what_the_model_takes(running: Running, browser: Browser, modalities: Any, told: str) -> None:
    browser.open(running.url + "/", 800, 600, "light")
    browser.until("document.getElementById('about').textContent.includes('tiny')")
    assert "Drop pictures, a PDF or a video anywhere" in browser.run("document.getElementById('hint').textContent")
    browser.run(f"introduce({json.dumps({'id': 'x', 'max_model_len': 1, 'modalities': modalities})})")
    assert told in browser.run("document.getElementById('hint').textContent")


@needs_browser
def test_contrast_is_enough_in_both_themes(running: Running, browser: Browser) -> None:
    script = """(() => {
      const root = getComputedStyle(document.documentElement), level = (name) => {
        const hex = root.getPropertyValue(name).trim();
        const part = (k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16) / 255;
        const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        return 0.2126 * linear(part(0)) + 0.7152 * linear(part(1)) + 0.0722 * linear(part(2));
      };
      const pairs = [["ink", "ground"], ["ink", "paper"], ["ink", "mine"], ["faint", "ground"], ["faint", "paper"],
                     ["bad", "paper"], ["loss", "paper"], ["on-mark", "mark"]];
      return pairs.map(([a, b]) => {
        const [x, y] = [level("--" + a), level("--" + b)].sort((p, q) => q - p);
        return [a, b, (x + 0.05) / (y + 0.05)];
      });
    })()"""
    for theme in ("light", "dark"):
        browser.open(running.url + "/", 800, 600, theme)
        for one, other, ratio in browser.run(script):
            assert ratio >= 4.5, (theme, one, other, ratio)


@needs_browser
def test_stop_and_errors_are_shown(running: Running, browser: Browser) -> None:
    browser.open(running.url + "/", 800, 600, "light")
    browser.until("document.getElementById('about').textContent.includes('tiny')")
    browser.run("document.getElementById('longest').value = 1900")
    browser.write("Go on for long.")
    browser.key("Enter")
    browser.until("document.querySelector('.answer .said')?.textContent.length > 20")
    browser.key("Escape")
    browser.until("document.querySelector('.answer .figures')?.textContent.includes('stopped')")
    running.idle()
    browser.run("document.getElementById('temperature').value = 500")
    browser.write("And now?")
    browser.key("Enter")
    browser.until("document.querySelector('.error')?.textContent.includes('temperature')")


WORDS = 'data: {"choices":[{"index":0,"delta":{"content":"some words"}}]}\\n\\n'


@needs_browser
@pytest.mark.parametrize(
    ("answer", "told", "said"),
    [
        (f"new Response('{WORDS}')", "The answer was cut off", "some words"),
        ("new Response('data: <html>\\n\\n')", "cannot be read", ""),
        ("Promise.reject(new TypeError('Failed to fetch'))", "The server cannot be reached", ""),
        ("new Response('<html>', { status: 502 })", "The server answered 502", ""),
        (f"torn('{WORDS}')", "has ended the connection", "some words"),
    ],
)
def test_an_answer_that_does_not_end_well_is_told(
    running: Running, browser: Browser, answer: str, told: str, said: str
) -> None:
    browser.open(running.url + "/", 360, 720, "light")
    browser.until("document.getElementById('about').textContent.includes('tiny')")
    browser.run("""window.torn = (text) => new Response(new ReadableStream({ start(stream) {
      stream.enqueue(new TextEncoder().encode(text));
      setTimeout(() => stream.error(new TypeError('network error')), 100); } }))""")
    browser.run(f"window.fetch = async () => {answer}")
    browser.write("What is it?")
    browser.key("Enter")
    browser.until("Boolean(document.querySelector('.error'))")
    assert told in browser.run("document.querySelector('.error').textContent")
    assert browser.run("document.querySelector('.answer .said').textContent") == said
    assert browser.run("document.getElementById('question').value") == "What is it?"
    assert browser.run("messages.length") == 0
    browser.run("document.getElementById('fresh').click()")
    assert "Drop pictures" in browser.run("document.getElementById('hint').textContent")


@needs_browser
def test_text_of_the_model_is_never_markup(running: Running, browser: Browser) -> None:
    evil = "<img src=x onerror='window.hit=1'><script>window.hit=1</script><b>bold</b>"
    receipt: dict[str, Any] = {
        "item": evil, "modality": evil, "index": 0, "given": {evil: evil}, "used": {}, "lost": [evil], "tokens": 1,
        "cached": False, "milliseconds": {}, "digest": "",
    }  # fmt: skip
    chunk = {"choices": [{"index": 0, "delta": {"content": evil, "reasoning_content": evil}}], "media": [receipt]}
    stream = f"data: {json.dumps(chunk)}\n\ndata: {json.dumps({'error': {'message': evil}})}\n\ndata: [DONE]\n\n"
    browser.open(running.url + "/", 800, 600, "light")
    browser.run(f"window.fetch = async () => new Response({json.dumps(stream)}); window.hit = 0")
    browser.write(evil)
    browser.key("Enter")
    browser.until("Boolean(document.querySelector('.error'))")
    assert browser.run("document.querySelectorAll('#talk img, #talk script, #talk b').length") == 0
    assert browser.run("window.hit") == 0
    assert evil in browser.run("document.querySelector('.answer .said').textContent")


# Requests are kept in `sent`; each is answered by `answer`, or by the server where that is null.
WATCHED = """(() => { const real = window.fetch; window.sent = []; window.answer = null;
  window.fetch = async (url, options) => {
    if (!options?.body) return real(url, options);
    window.sent.push(JSON.parse(options.body).messages);
    return window.answer ? window.answer(options.signal) : real(url, options);
  }; })()"""
# Some words of an answer that then goes on for ever.
ENDLESS = """window.answer = (signal) => new Response(new ReadableStream({ start(stream) {
  stream.enqueue(new TextEncoder().encode('data: {"choices":[{"index":0,"delta":{"content":"old words"}}]}\\n\\n'));
  signal.addEventListener('abort', () => stream.error(new DOMException('x', 'AbortError'))); } }))"""


def watched(running: Running, browser: Browser) -> None:
    browser.open(running.url + "/", 800, 600, "light")
    browser.until("document.getElementById('about').textContent.includes('tiny')")
    browser.run(WATCHED)
    browser.run("document.getElementById('longest').value = 8")


@needs_browser
def test_a_new_conversation_knows_nothing_of_an_answer_that_was_under_way(running: Running, browser: Browser) -> None:
    watched(running, browser)
    browser.run(ENDLESS)
    browser.write("first")
    browser.key("Enter")
    browser.until("document.querySelector('.answer .said')?.textContent === 'old words'")
    browser.run("window.answer = null; document.getElementById('fresh').click()")
    assert browser.run("document.activeElement.id") == "question"
    browser.write("second")
    browser.key("Enter")
    browser.until(ANSWER)
    assert browser.run("sent[1]") == [{"role": "user", "content": [{"type": "text", "text": "second"}]}]
    assert browser.run("document.querySelectorAll('.answer').length") == 1
    assert browser.run("document.getElementById('ask').disabled") is False
    assert browser.run("messages.length") == 2


@needs_browser
def test_a_file_that_is_still_being_read_is_waited_for(running: Running, browser: Browser) -> None:
    watched(running, browser)
    parts = browser.run("""(async () => {
      const words = 'data: {"choices":[{"index":0,"delta":{"content":"ok"}}]}\\n\\n';
      window.answer = () => new Response(words + 'data: [DONE]\\n\\n');
      add([new File([new Uint8Array(8 << 20)], 'film.mp4', { type: 'video/mp4' })]);
      document.getElementById('question').value = 'What happens?';
      await ask();
      return sent[0][0].content.map((part) => [part.type, part.video_url ? part.video_url.url.length : part.text]);
    })()""")
    assert parts == [
        ["video_url", len("data:video/mp4;base64,") + (((8 << 20) + 2) // 3) * 4],
        ["text", "What happens?"],
    ]
    assert browser.run("waiting.length") == 0


@needs_browser
def test_what_was_refused_can_be_asked_again(running: Running, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "shapes.png"
    tiny.picture(84, 56, 3).save(file)
    watched(running, browser)
    browser.give("#files", file)
    browser.until("document.querySelectorAll('#added img').length === 1")
    browser.run("document.getElementById('question').focus()")
    browser.write("A question typed by hand")
    browser.run("document.getElementById('temperature').value = 500")
    browser.key("Enter")
    browser.until("document.querySelector('.error')?.textContent.includes('temperature')")
    assert browser.run("document.getElementById('question').value") == "A question typed by hand"
    assert browser.run("document.querySelectorAll('#added img').length") == 1
    browser.run("document.getElementById('temperature').value = 0")
    browser.key("Enter")
    browser.until(ANSWER)
    assert browser.run("sent.length") == 2
    assert browser.run("JSON.stringify(sent[0]) === JSON.stringify(sent[1])")


# What stands in view of the files that were left out: above the question, or with the one that went without them.
SEEN = """[...document.querySelectorAll('.left .error')].filter((line) => {
    const box = line.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;
}).map((line) => line.textContent).join('|')"""


@needs_browser
@pytest.mark.parametrize("width", [1100, 360])
def test_a_file_that_is_left_out_is_told_of_in_view(
    running: Running, browser: Browser, tmp_path: Path, width: int
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("no picture")
    browser.open(running.url + "/", width, 720, "light")
    browser.until("document.getElementById('about').textContent.includes('tiny')")
    browser.run("document.getElementById('longest').value = 8")
    browser.give("#files", tmp_path / "gone.png", note)
    browser.until("document.querySelectorAll('#left .error').length === 2")
    keep(browser, f"left-out-{width}")
    found = browser.run(SEEN)
    assert "gone.png cannot be read." in found
    assert "note.txt is neither a picture nor a PDF nor a video nor a sound." in found
    assert browser.run("document.querySelectorAll('#added li').length") == 0
    browser.write("What is it?")
    browser.key("Enter")
    browser.until(ANSWER)
    assert browser.run("document.querySelectorAll('.mine .left .error').length") == 2
    assert browser.run("document.querySelectorAll('#left .error').length") == 0


@needs_browser
def test_files_are_dropped_onto_the_page(running: Running, browser: Browser, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.png", "two.png")]
    for seed, file in enumerate(files):
        tiny.picture(84, 56, seed).save(file)
    note = tmp_path / "note.txt"
    note.write_text("no picture")
    watched(running, browser)
    browser.drop(400, 200, *files, note)
    browser.until("document.querySelectorAll('#added img').length === 2")
    assert "note.txt is neither" in browser.run(SEEN)
    browser.write("What are they?")
    browser.key("Enter")
    browser.until(ANSWER)
    assert browser.run("sent[0][0].content.map((part) => part.type)") == ["image_url", "image_url", "text"]
    assert browser.run("document.querySelectorAll('.answer summary').length") == 2


@needs_browser
def test_a_pdf_has_a_receipt_for_each_page(running: Running, browser: Browser, tmp_path: Path) -> None:
    """Pictures after it are still shown with their own receipts, also in a later question."""
    pytest.importorskip("pypdfium2")
    document, picture = tmp_path / "two.pdf", tmp_path / "one.png"
    pages = [tiny.picture(144, 100, seed) for seed in range(2)]
    pages[0].save(document, save_all=True, append_images=pages[1:])
    tiny.picture(84, 56, 3).save(picture)
    watched(running, browser)
    browser.drop(400, 200, document, picture)
    browser.until("document.querySelectorAll('#added li').length === 2")
    assert browser.run("document.querySelector('#added .sound').textContent") == "two.pdf"
    browser.write("What are they?")
    browser.key("Enter")
    browser.until(ANSWER)
    assert browser.run("sent[0][0].content.map((part) => part.type)") == ["file", "image_url", "text"]
    captions = browser.run("[...document.querySelectorAll('.answer figcaption')].map((node) => node.textContent)")
    assert [caption.split(" \u00b7 ")[0].split(",")[0] for caption in captions] == [
        "image 1page 1 of 2",
        "image 2page 2 of 2",
        "image 384 \u00d7 56",
    ]
    # The pages have no picture here; the picture has.
    shown = "[...document.querySelectorAll('.answer .receipt')].map((node) => node.querySelectorAll('img').length)"
    assert browser.run(shown) == [0, 0, 1]
    browser.write("And now?")
    browser.key("Enter")
    browser.until("document.querySelectorAll('.answer')[1]?.textContent.includes('image 1, image 2, image 3')")


# What the server finds in a picture of 200 by 100 pixels that its file holds on its side (EXIF orientation 6).
FOUND = read(
    '[{"label": "<b>cat</b>", "bbox_2d": [100, 100, 500, 600]}, {"label": "nose", "point_2d": [750, 500]}]',
    AnswerGrounding(Grounding("json", grid=1000), (GroundedImage(100, 200, 6),)),
)
# What it would answer of this picture, cropped to its middle, with a box and a point.
POINTED: dict[str, Any] = {
    "media": [
        {
            "item": "image 1", "modality": "image", "index": 0, "given": {"width": 200, "height": 100},
            "used": {"width": 20, "height": 20, "crop": [50, 0, 150, 100]}, "lost": ["50 % was cut off at the edges"],
            "tokens": 4, "cached": False, "milliseconds": {}, "digest": "",
        }
    ],
    "choices": [
        {
            "index": 0, "delta": {"content": "there"}, "finish_reason": "stop",
            "grounding": [found.to_json() for found in FOUND],
        }
    ],
}  # fmt: skip


@needs_browser
def test_receipts_and_boxes_are_drawn_on_the_picture(running: Running, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "wide.png"
    tiny.picture(200, 100, 1).save(file)
    watched(running, browser)
    stream = f"data: {json.dumps(POINTED)}\n\ndata: [DONE]\n\n"
    browser.run(f"window.answer = () => new Response({json.dumps(stream)})")
    browser.give("#files", file)
    browser.until("document.querySelectorAll('#added img').length === 1")
    browser.write("Where is it?")
    browser.key("Enter")
    browser.until("document.querySelectorAll('.view .box, .view .point').length === 2")
    placed = """((name) => { const view = document.querySelector('.view').getBoundingClientRect(),
      node = document.querySelector(`.view .${name}`).getBoundingClientRect(), part = (at) => Math.round(100 * at);
      return [part((node.left - view.left) / view.width), part((node.top - view.top) / view.height),
              part((node.right - view.left) / view.width), part((node.bottom - view.top) / view.height)]; })"""
    for name, place in (("box", [10, 10, 50, 60]), ("crop", [25, 0, 75, 100])):
        assert browser.run(f"{placed}('{name}')") == pytest.approx(place, abs=2)
    left, top, right, bottom = browser.run(f"{placed}('point')")
    assert [(left + right) / 2, (top + bottom) / 2] == pytest.approx([75, 50], abs=2)
    assert browser.run("document.querySelector('.view .label').textContent") == "<b>cat</b>"
    assert "200 \u00d7 100, seen as 20 \u00d7 20" in browser.run("document.querySelector('figcaption').textContent")
    assert "cut off" in browser.run("document.querySelector('.loss').textContent")
    browser.run("document.querySelector('figcaption button').click()")
    assert browser.run("(({ width, height }) => [width, height])(document.querySelector('.view canvas'))") == [20, 20]
    browser.run("document.querySelector('figcaption button').click()")
    assert browser.run("document.querySelector('.view canvas')") is None


@needs_browser
def test_examples_are_drawn_sent_and_answered(running: Running, browser: Browser) -> None:
    watched(running, browser)
    assert browser.run("document.querySelectorAll('.example').length") == 4
    browser.run("document.querySelectorAll('.example')[2].click()")
    browser.until(ANSWER)
    assert browser.run("sent[0][0].content.map((part) => part.type)") == ["image_url", "image_url", "text"]
    browser.run("fresh(); document.querySelectorAll('.example')[3].click()")
    browser.until("sent.length === 2")
    browser.until(ANSWER)
    assert browser.run("sent[1][0].content[0].video_url.url.startsWith('data:video/')")
    assert browser.run("document.querySelectorAll('.span .frame').length") > 1


@needs_browser
def test_an_answer_that_was_cut_goes_on(running: Running, browser: Browser) -> None:
    watched(running, browser)
    # The words of the tiny model may be none; these are.
    browser.run("document.getElementById('longest').value = 4")
    browser.write("Say something.")
    browser.key("Enter")
    browser.until("Boolean(document.querySelector('.continue'))")
    first = browser.run("document.querySelector('.answer .said').textContent")
    browser.run("document.querySelector('.continue').click()")
    browser.until(f"sent.length === 2 && !running && {ANSWER}")
    whole = browser.run("document.querySelector('.answer .said').textContent")
    assert whole.startswith(first)
    assert len(whole) > len(first)
    assert browser.run("sent[1]")[-1] == {"role": "assistant", "content": first}
    assert browser.run("messages.at(-1).content") == whole
    assert browser.run("document.querySelectorAll('.answer').length") == 1


HARD = "Is $HOME `date` \"a\\nb\" or 'c'?"


@needs_browser
def test_the_code_of_a_request_asks_the_same(running: Running, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "it's a picture.png"
    tiny.picture(84, 56, 3).save(file)
    watched(running, browser)
    browser.run("document.getElementById('temperature').value = 0")
    browser.give("#files", file)
    browser.until("document.querySelectorAll('#added img').length === 1")
    browser.write(HARD)
    browser.key("Enter")
    browser.until(ANSWER)
    said = browser.run("document.querySelector('.answer .said').textContent")
    browser.run("[...document.querySelectorAll('.foot button')].find((node) => node.textContent === 'Code').click()")
    codes = {}
    for language in ("python", "curl", "javascript"):
        browser.run(f"document.querySelector('[data-language={language}]').click()")
        codes[language] = browser.run("document.getElementById('text').textContent")
        keep(browser, f"code-{language}")
    body = {"model": "tiny", "messages": browser.run("sent[0]"), "temperature": 0, "max_completion_tokens": 8}
    assert called(codes["python"], tmp_path) == (f"{running.url}/v1", body)
    shell = codes["curl"].replace("curl http", "printf '%s\\n' http", 1).replace("--data-binary @-", "; cat", 1)
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout[done.stdout.index("{") :]) == body
    if node := shutil.which("node"):
        script = tmp_path / "ask.mjs"
        script.write_text(codes["javascript"])
        done = subprocess.run([node, script], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.removesuffix("\n") == said
    browser.run("document.getElementById('close').click()")
    assert browser.run("document.getElementById('code').open") is False


def called(code: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """What a Python code makes of OpenAI's client: the address, and the arguments of its one call."""
    found: list[Any] = []

    class Client:
        def __init__(self, base_url: str, api_key: str) -> None:
            found.append(base_url)
            self.chat = self.completions = self
            self.choices = [self]
            self.message = self
            self.content = ""

        def create(self, **arguments: Any) -> Client:
            found.append(arguments)
            return self

    code = code.replace("from openai import OpenAI", "").replace("open(path", "open(folder / path")
    exec(code, {"OpenAI": Client, "folder": folder, "__name__": "example"})
    address, arguments = found
    return address, arguments


@needs_browser
def test_one_of_several_models_is_chosen(running: Running, browser: Browser) -> None:
    watched(running, browser)
    assert browser.run("document.getElementById('model').hidden")
    cards = [{"id": name, "max_model_len": 9, "modalities": kinds} for name, kinds in (("a", []), ("b", ["audio"]))]
    browser.run(f"choose({json.dumps({'data': cards})})")
    assert browser.run("[document.getElementById('model').hidden, document.getElementById('record').hidden]") == [
        False,
        True,
    ]
    browser.run("""(() => { const list = document.getElementById('model'); list.value = 'b';
      list.dispatchEvent(new Event('change')); })()""")
    assert browser.run("name") == "b"
    assert browser.run("document.getElementById('record').hidden") is False
    assert browser.run("request([]).model") == "b"


@needs_browser
def test_below_the_answer_to_what_the_model_does_not_know_stands_another_model(
    running: Running, browser: Browser
) -> None:
    watched(running, browser)
    card = {"id": "x", "max_model_len": 1, "modalities": [], "advice": {"answer": "Unknown.", "text": "Serve y."}}
    browser.run(f"introduce({json.dumps(card)})")
    advised = """((whole) => { const answer = begun(); answer.whole = whole; answer.found = {};
      ended(answer, [{ content: whole }], []); return answer.node.querySelector(".advice")?.textContent; })"""
    assert browser.run(f"{advised}('Unknown.')") == "Serve y."
    assert browser.run(f"{advised}('A red circle.')") is None


@needs_browser
def test_new_media_begin_anew_with_a_model_that_knows_one_question_only(
    running: Running, browser: Browser, tmp_path: Path
) -> None:
    """With the embedded model: it described the example again when a question about a photograph followed it."""
    file = tmp_path / "shapes.png"
    tiny.picture(84, 56, 3).save(file)
    watched(running, browser)
    browser.until("!document.getElementById('draw').hidden")
    card = {"id": browser.run("name"), "max_model_len": 2048, "modalities": ["image"]}
    advised = {**card, "advice": {"answer": "Unknown.", "text": "Serve y."}}
    for number, (model, kept) in enumerate(((card, 3), (advised, 1)), 1):
        browser.run(f"fresh(); introduce({json.dumps(model)}); window.sent = []")
        assert browser.run("document.getElementById('draw').hidden") == (model is advised)
        for turn in (1, 2):
            browser.give("#files", file)
            browser.until("document.querySelectorAll('#added img').length === 1")
            browser.write(f"Question {number}")
            browser.key("Enter")
            browser.until(f"sent.length === {turn} && document.getElementById('stop').hidden")
        assert browser.run("sent[1].length") == kept
        assert browser.run("document.querySelector('#talk > .figures') !== null") == (model is advised)
    # What follows without media is of the same conversation.
    browser.write("And now?")
    browser.key("Enter")
    browser.until("sent.length === 3 && document.getElementById('stop').hidden")
    assert browser.run("sent[2].length") == 3


@needs_browser
def test_a_refusal_is_in_view_above_what_it_puts_back(running: Running, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "wide.png"
    tiny.picture(640, 480, 3).save(file)
    watched(running, browser)
    for temperature in (0, 500):
        browser.give("#files", file)
        browser.until("document.querySelectorAll('#added img').length === 1")
        browser.run(f"document.getElementById('temperature').value = {temperature}")
        browser.write("What is it?")
        browser.key("Enter")
        browser.until("messages.length > 1 && document.getElementById('stop').hidden")
    browser.until("Boolean(document.querySelector('.error'))")
    assert browser.run("""(() => { const error = document.querySelector('.error').getBoundingClientRect(),
      talk = document.getElementById('talk').getBoundingClientRect();
      return error.top >= talk.top - 1 && error.bottom <= talk.bottom + 1; })()""")


@needs_browser
def test_sound_is_recorded_as_a_file_that_every_model_reads(running: Running, browser: Browser) -> None:
    watched(running, browser)
    browser.run("record()")
    browser.until("document.getElementById('record').textContent === 'End recording'")
    browser.run("new Promise((resolve) => setTimeout(resolve, 150))")
    browser.run("record()")
    browser.until("document.querySelectorAll('#added audio').length === 1")
    url = browser.run("waiting[0].url")
    assert url.startswith("data:audio/wav;base64,")
    with wave.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getsampwidth()) == (1, 16000, 2)
        assert 800 < sound.getnframes() < 48000
    assert browser.run("document.getElementById('record').getAttribute('aria-pressed')") == "false"
    # The microphone beeps once a second and may have been silent; these notes come out as they went in.
    own, heard, worst = browser.run("""(async () => {
      const own = new DataView(await notes('x').arrayBuffer()), heard = new DataView(await plain(notes('x')));
      let worst = 0;
      for (let k = 44; k < own.byteLength; k += 2) {
        worst = Math.max(worst, Math.abs(own.getInt16(k, true) - heard.getInt16(k, true)));
      }
      return [own.byteLength, heard.byteLength, worst]; })()""")
    assert own == heard == 44 + 2 * 24000
    assert worst <= 2
