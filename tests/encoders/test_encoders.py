"""Towers in another process give the same answers as those of the engine, and may go away at any time."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from beheld import LLM
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.core.media import ENCODED, MediaItem
from beheld.core.plan import EncodeItem
from beheld.encoders import client
from beheld.encoders.client import RemoteEncoders
from beheld.encoders.messages import MODEL_HEADER, PATH, Ask, Found, packed, unpacked
from beheld.engine import encoder_server
from beheld.engine.encoder_server import Encoder, EncoderServer, load
from beheld.executor.local import LocalExecutor
from tests import tiny
from tests.oracle import cases
from tests.oracle.cases import Ask as Question
from tests.oracle.test_oracle import check, make

TOKEN = "a secret of the tests".replace(" ", "-")
IMAGES = (
    Question("{i} what", images=((84, 56, 1),)),
    Question("{i} and {i}", images=((56, 84, 2), (84, 56, 1))),
)
QUESTIONS = {
    "llava": IMAGES,
    # Its towers give columns for later layers, too.
    "qwen3_vl": (*IMAGES, Question("{v} what", videos=(cases.Clip(4),))),
    "qwen2_audio": (Question("{a} what", sounds=((0.5, 1),)),),
}

NEW = {
    "llava": Question("{i} new", images=((70, 70, 9),)),
    "qwen3_vl": Question("{i} new", images=((70, 70, 9),)),
    "qwen2_audio": Question("{a} new", sounds=((0.4, 9),)),
}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_ENCODER_TOKEN", TOKEN)


def loaded(family: str) -> Encoder:
    return load(EngineArgs(model=str(tiny.checkpoint(family)), dtype="float32", device="cpu"), 1 << 26)


@contextmanager
def serving(encoder: Any) -> Iterator[str]:
    """The address of a server; all its connections end with the block."""
    server = EncoderServer(encoder, TOKEN, ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.drain(5.0)
        server.server_close()
        thread.join()


def engine(family: str, *urls: str) -> LLM:
    return make(family, cases.ROOMY | {"device": "cpu", "encoder_urls": list(urls)})


@pytest.mark.parametrize("family", QUESTIONS)
def test_answers_are_those_of_local_towers_with_and_without_the_encoder(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded(family)
    asks = QUESTIONS[family]
    with ExitStack() as stack:
        with serving(encoder) as url:
            llm = stack.enter_context(engine(family, url))
            executor = llm._live().core.executor
            assert isinstance(executor, LocalExecutor)

            def refused(items: Any) -> None:
                raise AssertionError("a tower of the engine ran")

            with monkeypatch.context() as patch:
                patch.setattr(executor.runner.encoder._adapter, "encode", refused)
                check(llm, family, asks)
            given = {part for ask in asks for part in (*ask.images, *ask.videos, *ask.sounds)}
            assert encoder.num_encoded == len(given)
        # What neither the encoder, which is gone, nor the client has.
        check(llm, family, [NEW[family]])


def test_layers_that_an_encoder_leaves_out_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(EngineArgs(model=str(tiny.checkpoint("llava")), device="cpu"), 1 << 20)
    assert not caplog.messages


class Counts:
    """Stands in for an encoder: embeddings of ones, and what it was asked."""

    model = "m"

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.known: dict[bytes, torch.Tensor] = {}

    def answer(self, ask: Ask) -> Found:
        self.asked.append(ask)
        made = {item.digest: torch.ones(item.num_embeds, 4) for item in ask.items}
        self.known |= made
        return Found(tuple(self.known.get(digest) for digest in (*ask.digests, *made)))


def item_of(number: int) -> MediaItem:
    return MediaItem("image", bytes([number]) * 32, {"pixel_values": torch.zeros(3, 8, 8)}, {}, (1, 1), None, 2, 768)


def test_a_known_digest_costs_no_pixels() -> None:
    encoder = Counts()
    with serving(encoder) as url:
        first = RemoteEncoders([url], TOKEN, "m", "float32").replaced([item_of(1), item_of(2), item_of(1)])
        assert [list(item.features) for item in first] == [[ENCODED]] * 3
        assert [len(ask.items) for ask in encoder.asked] == [0, 0, 2]
        again = RemoteEncoders([url], TOKEN, "m", "float32")
        found = again.replaced([item_of(1)])
        assert torch.equal(found[0].features[ENCODED], torch.ones(2, 4))
        assert found[0].feature_bytes == 32
        assert [len(ask.items) for ask in encoder.asked] == [0, 0, 2, 0, 0]
        again.replaced([item_of(1)])
        assert len(encoder.asked) == 5, "the client asked for embeddings that it has"


def test_each_item_asks_one_of_several_encoders() -> None:
    one, two = Counts(), Counts()
    with serving(one) as first, serving(two) as second:
        items = [item_of(number) for number in range(32)]
        for urls in ([first, second], [second, first]):
            found = RemoteEncoders(urls, TOKEN, "m", "float32").replaced(items)
            assert all(ENCODED in item.features for item in found)
    assert len(one.known) + len(two.known) == 32
    assert min(len(one.known), len(two.known)) >= 4


def test_an_encoder_that_goes_away_leaves_the_features_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_AWAY_S", 0.0)
    encoder = Counts()
    with serving(encoder) as url:
        remote = RemoteEncoders([url], TOKEN, "m", "float32")
        assert ENCODED in remote.replaced([item_of(1)])[0].features
    assert "pixel_values" in remote.replaced([item_of(2)])[0].features
    assert ENCODED in remote.replaced([item_of(1)])[0].features, "what the client has needs no encoder"
    server = EncoderServer(encoder, TOKEN, ("127.0.0.1", int(url.rsplit(":", 1)[1])))  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    assert ENCODED in remote.replaced([item_of(2)])[0].features
    server.drain(5.0)
    server.server_close()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX-",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n",
    ],
)
def test_an_encoder_that_sends_byte_after_byte_is_away(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece of its answer comes late, but the whole never comes."""
    monkeypatch.setattr(client, "_WHOLE_S", 0.5)
    ended = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with suppress(OSError):
            while not ended.is_set():
                end, _ = listener.accept()
                with end, suppress(OSError):
                    end.sendall(head)
                    while not ended.wait(0.02):
                        end.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20.0)
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        begun = time.monotonic()
        remote = RemoteEncoders([f"http://127.0.0.1:{listener.getsockname()[1]}"], TOKEN, "m", "float32")
        assert "pixel_values" in remote.replaced([item_of(1)])[0].features
        took_s = time.monotonic() - begun
        ended.set()
        thread.join()
    assert took_s < 5.0


def test_connections_that_ask_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread, also of who does not know the secret."""
    monkeypatch.setattr(encoder_server, "_MOST_CONNECTIONS", 4)
    with serving(Counts()) as url:
        address = "127.0.0.1", int(url.rsplit(":", 1)[1])
        idle = [socket.create_connection(address, 5.0) for _ in range(4)]
        with socket.create_connection(address, 5.0) as one_more:
            assert one_more.recv(1) == b""
        for each in idle:
            each.close()
        until = time.monotonic() + 5.0
        while True:
            try:
                RemoteEncoders([url], TOKEN + "x", "m", "float32")
            except ConfigError:
                break
            assert time.monotonic() < until


@pytest.mark.parametrize("made", [torch.ones(3, 4), torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(8), None])
def test_embeddings_of_a_wrong_form_are_not_taken(made: torch.Tensor | None) -> None:
    encoder = Counts()
    encoder.answer = lambda ask: Found((made,) * (len(ask.digests) + len(ask.items)))  # type: ignore[method-assign]
    with serving(encoder) as url:
        remote = RemoteEncoders([url], TOKEN, "m", "float32")
        assert "pixel_values" in remote.replaced([item_of(1)])[0].features


def test_a_wrong_secret_and_other_weights_are_refused_at_the_start() -> None:
    with serving(Counts()) as url:
        with pytest.raises(ConfigError, match="refuses the token"):
            RemoteEncoders([url], TOKEN + "x", "m", "float32")
        with pytest.raises(ConfigError, match="other weights"):
            RemoteEncoders([url], TOKEN, "another", "float32")
        with pytest.raises(ConfigError, match="no address"):
            RemoteEncoders(["127.0.0.1:80"], TOKEN, "m", "float32")
        with pytest.raises(ConfigError, match="other weights"):
            engine("llava", url)


def test_an_encoder_that_comes_back_with_other_weights_fails_no_request() -> None:
    encoder = Counts()
    with serving(encoder) as url:
        remote = RemoteEncoders([url], TOKEN, "m", "float32")
        encoder.model = "another"
        assert "pixel_values" in remote.replaced([item_of(1)])[0].features


def test_an_engine_without_a_secret_or_towers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no towers"):
        engine("llama", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="no towers"):
        loaded("mllama")
    monkeypatch.delenv("BEHELD_ENCODER_TOKEN")
    with pytest.raises(ConfigError, match="BEHELD_ENCODER_TOKEN"):
        engine("llava", "http://127.0.0.1:9")


def status_of(url: str, body: bytes, **headers: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request("POST", PATH, body, {name.replace("_", "-"): value for name, value in headers.items()})
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_server_answers_no_one_without_the_secret_and_survives_nonsense() -> None:
    encoder = Counts()
    good = packed(Ask((b"x" * 32,), ()))
    right = {"Authorization": f"Bearer {TOKEN}", MODEL_HEADER: "m"}
    with serving(encoder) as url:
        assert status_of(url, good) == 401
        assert status_of(url, good, Authorization="Bearer x") == 401
        assert status_of(url, good, **(right | {MODEL_HEADER: "n"})) == 409
        assert status_of(url, b"", **(right | {"Content-Length": str(1 << 40)})) == 413
        assert status_of(url, b"nonsense", **right) == 400
        assert status_of(url, packed(Found(())), **right) == 400
        assert not encoder.asked
        assert status_of(url, good, **right) == 200


def test_a_message_arrives_as_it_was_sent() -> None:
    item = EncodeItem(b"d" * 32, "image", {"pixel_values": torch.arange(6, dtype=torch.bfloat16).view(2, 3)}, 2)
    found = unpacked(packed(Ask((b"e" * 32,), (item,))))
    assert (found.digests, found.items[0].digest, found.items[0].num_embeds) == ((b"e" * 32,), b"d" * 32, 2)
    assert torch.equal(found.items[0].features["pixel_values"], item.features["pixel_values"])
