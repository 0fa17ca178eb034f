"""The online examples of vLLM's page on multimodal inputs, run as they stand but for models, addresses and tensors."""

from __future__ import annotations

import argparse
import base64
import io
import queue
import re
import shlex
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import openai
import pytest
import torch

from beheld.cli.flags import engine_options
from beheld.cli.main import main
from beheld.cli.serve import add_arguments
from beheld.server import listen as listening
from beheld.server import serve
from tests import tiny
from tests.oracle import cases, reference
from tests.server.running import ENGINE, Running

FOLDER = Path(__file__).parents[3] / "shared" / "seeds"


@cache
def page() -> str:
    """The part of the page about the server; its tests are skipped where it is not."""
    found = sorted(FOLDER.glob("004_*"))
    if not found:
        pytest.skip("the documents are not here")
    return found[0].read_text(encoding="utf-8").split("\nOnline Serving#\n")[1]


def between(start: str, stop: str, which: int = 0) -> str:
    """The text from the nth `start` on, up to the next `stop`."""
    rest = page().split(start)[which + 1]
    return start + rest.split(stop)[0]


def video() -> bytes:
    """A short film."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made:
        stream = made.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for array in tiny.frames(16, 0, 64, 48):
            made.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        made.mux(stream.encode(None))
    return file.getvalue()


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    tiny.picture(320, 240, seed).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def assets() -> Iterator[str]:
    """A server of pictures, a film and a sound; the first picture lies behind a redirect, as real ones do."""
    files = {
        "/one.jpg": picture(1),
        "/two.jpg": picture(2),
        "/three.jpg": picture(3),
        "/film.mp4": video(),
        "/sound.wav": tiny.wav(tiny.sound(1.0)),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path)
            self.send_response(302 if self.path == "/moved.jpg" else 404 if body is None else 200)
            self.send_header("Location", "/one.jpg")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assets lie on this machine; a server in the world would not look there."""
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def hearing() -> Iterator[Running]:
    """A model that takes sounds."""
    found = Running("qwen2_audio", ENGINE | {"limit_mm_per_prompt": {"audio": 2}, "max_model_len": 1024})
    yield found
    found.close()


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    """A model whose embeddings need no grid."""
    found = Running("llava", ENGINE | {"limit_mm_per_prompt": {"image": 2}, "max_model_len": 512})
    yield found
    found.close()


def play(
    code: str, server: Running, capsys: pytest.CaptureFixture[str], changes: dict[str, str], **names: Any
) -> tuple[str, Any]:
    """Run a piece of the page: what it prints, and its names."""
    for old, new in {"http://localhost:8000/v1": server.url + "/v1", **changes}.items():
        assert old in code or "localhost" in old, old
        code = code.replace(old, new)
    code = re.sub(r'model="[\w.-]+/[\w.-]+"', 'model="tiny"', code)
    scope = {"model": "tiny", **names}
    exec(compile(code, "page", "exec"), scope)
    for value in scope.values():
        if isinstance(value, openai.OpenAI):
            value.close()
    server.idle()
    return capsys.readouterr().out, scope


def test_pictures_at_addresses(running: Running, assets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = between("from openai import OpenAI", "Full example")
    shown = iter(["/moved.jpg", "/two.jpg", "/three.jpg"])
    changes = {url: assets + next(shown) for url in re.findall(r'"(https://upload[^"]+)"', code)}
    printed, _ = play(code, running, capsys, changes)
    assert printed.count("Chat completion output:") == 2
    for line in printed.splitlines():
        assert len(line) > len("Chat completion output: ") or "output" not in line


def test_a_film_at_an_address(running: Running, assets: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = between("from openai import OpenAI", "Full example", 1)
    (url,) = re.findall(r'"(http://commondata[^"]+)"', code)
    printed, names = play(code, running, capsys, {url: assets + "/film.mp4"})
    assert "output from image url: " in printed
    assert names["chat_completion_from_url"].media[0]["used"]["frames"] > 4


def test_a_sound_within_the_request_and_at_an_address(
    hearing: Running, assets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = between("import base64\nimport requests", "Alternatively")
    code += between("chat_completion_from_url = client.chat.completions.create(", "Full example", 1)
    changes = {
        "from vllm.assets.audio import AudioAsset\n": "",
        'AudioAsset("winning_call").url': repr(assets + "/sound.wav"),
    }
    printed, names = play(code, hearing, capsys, changes)
    assert "from input audio: " in printed
    assert "from audio url: " in printed
    (within,) = names["chat_completion_from_base64"].media
    (at,) = names["chat_completion_from_url"].media
    assert within["digest"] == at["digest"]
    assert (within["cached"], at["cached"]) == (False, True)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_embeddings(
    running: Running, seeing: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    found = reference.image_embeds(family, cases.ONE)
    tensors = [found] if family == "llava" else [found["image_embeds"], found["image_grid_thw"]]
    head, rest = between("image_embedding = torch.load(...)", "\nNote\n").split("client = OpenAI(", 1)
    client, forms = rest.split("# Basic usage", 1)
    basic, added = forms.split("# Pass additional parameters", 1)
    ask = added[added.index("chat_completion = ") :]
    qwen = added[added.index('model = "Qwen') : added.index('model = "openbmb')]
    left = iter(tensors)
    monkeypatch.setattr(torch, "load", lambda *_: next(left, None))
    form = basic if family == "llava" else f"\n{qwen}"
    code = f"{head}client = OpenAI({client}# Basic usage{form}model = 'tiny'\n{ask}"
    grid = io.BytesIO()
    torch.save(tensors[-1], grid)
    names = {
        "io": io,
        "base64": base64,
        "torch": torch,
        "OpenAI": openai.OpenAI,
        "openai_api_key": "EMPTY",
        "openai_api_base": "http://localhost:8000/v1",
        "base64_image_grid_thw": base64.b64encode(grid.getvalue()).decode(),
    }
    server = seeing if family == "llava" else running
    names["openai_api_base"] = server.url + "/v1"
    # The library's own loading is put back before the server needs it.
    code = code.replace("client = OpenAI(", "restore()\nclient = OpenAI(")
    play(code + "\nprint(chat_completion.media[0])\n", server, capsys, {}, restore=monkeypatch.undo, **names)


def test_every_kind_of_part(running: Running, hearing: Running, assets: str) -> None:
    """The same without the page: what is at an address is what is within the request."""

    def digests(server: Running, *parts: dict[str, Any]) -> list[str]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
            answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=4)
        return [item["digest"] for item in answer.model_extra["media"]]  # type: ignore[index]

    def data(kind: str, content: bytes) -> str:
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"

    film, sound = video(), tiny.wav(tiny.sound(1.0))
    seen = digests(
        running,
        {"type": "image_url", "image_url": {"url": assets + "/moved.jpg"}},
        {"type": "image_url", "image_url": {"url": data("image/jpeg", picture(1)), "detail": "high"}},
        {"type": "video_url", "video_url": {"url": assets + "/film.mp4"}},
    )
    assert seen[0] == seen[1] != seen[2]
    assert digests(running, {"type": "video_url", "video_url": {"url": data("video/mp4", film)}}) == seen[2:]
    heard = digests(
        hearing,
        {"type": "audio_url", "audio_url": {"url": assets + "/sound.wav"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}},
    )
    assert heard[0] == heard[1]
    assert digests(hearing, {"type": "audio_url", "audio_url": {"url": data("audio/wav", sound)}}) == heard[:1]


def test_the_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"^vllm serve (?:.*\\\n)*.*$", page(), re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = shlex.split(line.replace("\\\n", " "))[2:]
        arguments = parser.parse_args(words)
        assert arguments.model_tag == words[0]
        options = engine_options(arguments)
        assert len(options) == sum(word.startswith("--") for word in words)
        if "limit_mm_per_prompt" in options:
            assert options["limit_mm_per_prompt"] == {"image": 2}


def run_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run `beheld serve` with these words in this process; gives its address, and ends it when it is asked again."""
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended: list[int] = []
    monkeypatch.setattr(serve, "make", lambda *told, make=serve.make: _told(make(*told), made))
    command = ["serve", *words, "--port", "0", "--num-gpu-blocks-override", "600", "--disable-log-stats"]
    monkeypatch.setattr(listening, "listen", lambda options, listen=listening.listen: _told(listen(options), made))
    thread = threading.Thread(target=lambda: _told(ended.append(main(command)), made))
    thread.start()
    listener, (server, _) = made.get(timeout=60), made.get(timeout=60)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert ended == [0]


def _told(thing: Any, queue: queue.SimpleQueue[Any]) -> Any:
    queue.put(thing)
    return thing


@pytest.mark.parametrize(
    ("number", "family", "limit", "num_items"),
    [(0, "phi3_v", 4096, 2), (1, "llava_onevision", 8192, 1), (2, "ultravox", None, 1)],
)
def test_the_command_lines_serve(
    monkeypatch: pytest.MonkeyPatch, number: int, family: str, limit: int | None, num_items: int
) -> None:
    """The three lines as they stand, with small models of the same kinds, and questions within their limits."""
    line = re.findall(r"^vllm serve (?:.*\\\n)*.*$", page(), re.MULTILINE)[number]
    _, _, _, *words = shlex.split(line.replace("\\\n", " "))
    model = str(tiny.checkpoint(family))
    # The small checkpoint has fewer positions than the real one.
    longer = (
        [] if family != "llava_onevision" else ["--hf-overrides", '{"text_config": {"max_position_embeddings": 8192}}']
    )
    running = run_line([model, *words, *longer], monkeypatch)
    url = next(running)
    if family == "ultravox":
        sound = base64.b64encode(tiny.wav(tiny.sound(1.0))).decode()
        items: list[Any] = [{"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}] * 2
    else:
        encoded = [base64.b64encode(picture(number)).decode() for number in range(num_items + 1)]
        items = [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + text}} for text in encoded]
    with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
        (told,) = client.models.list().data
        assert told.id == Path(model).name
        if limit is not None:
            assert told.model_extra is not None
            assert told.model_extra["max_model_len"] == limit
        content: Any = [{"type": "text", "text": "What is it?"}, *items[:num_items]]
        ask: Any = {"model": told.id, "max_completion_tokens": 4, "messages": [{"role": "user", "content": content}]}
        assert client.chat.completions.create(**ask).usage.completion_tokens in range(1, 5)  # type: ignore[union-attr]
        if "--limit-mm-per-prompt" in words:
            content.append(items[-1])
            with pytest.raises(openai.BadRequestError, match="image"):
                client.chat.completions.create(**ask)
    assert next(running, None) is None
