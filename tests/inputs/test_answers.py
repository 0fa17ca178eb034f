"""What strange servers answer: redirects to anywhere, bodies without an end, lengths that lie, folded bodies."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import time
import zlib
from typing import Any

import pytest

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, FetchError, LimitError
from beheld.core.media import MediaRef
from beheld.inputs.fetch import pinned_http
from beheld.inputs.fetch.fetch import FetchRules, fetch
from beheld.inputs.fetch.fetcher import Fetcher
from beheld.inputs.fetch.shares import Shares
from tests.inputs import pipes
from tests.inputs.servers import plain
from tests.memory import peak
from tests.server.slowness import best, slowness

DATA = b"x" * 1000
SMALL = FetchRules(limits=MediaLimits(max_item_bytes=4000))
LARGE = FetchRules(limits=MediaLimits(max_item_bytes=4 << 20))


@pytest.mark.usefixtures("private")
@pytest.mark.case(3)
def test_redirects_are_followed_three_times_and_checked(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hop(connection: socket.socket, head: bytes) -> None:
        left = int(head.split()[1].rsplit(b"/", 1)[1])
        if left == 0:
            plain(DATA)(connection, head)
        else:
            plain(b"", "302 Found", f"Location: /{left - 1}", "Set-Cookie: a=b")(connection, head)

    server = serve(hop)
    assert fetch(server.url("/3"), "image", SMALL).data == DATA
    assert all(b"ookie" not in request for request in server.requests)
    with pytest.raises(FetchError, match="more than 3"):
        fetch(server.url("/4"), "image", SMALL)
    canary = serve(plain(DATA))
    lure = serve(plain(b"", "307 Temporary Redirect", f"Location: {canary.url()}"))
    monkeypatch.setattr(pinned_http, "is_public", lambda address: False)
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    real = pinned_http.address_of
    calls: list[int] = []

    async def second_hop_is_checked(host: str, port: int, shares: Shares) -> str:
        calls.append(port)
        if len(calls) > 1:
            monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "0")
        return await real(host, port, shares)

    monkeypatch.setattr(pinned_http, "address_of", second_hop_is_checked)
    with pytest.raises(FetchError, match="not public"):
        fetch(lure.url(), "image", SMALL)
    assert calls == [lure.port, canary.port]
    assert canary.requests == []


@pytest.mark.usefixtures("private")
@pytest.mark.case(3)
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_every_kind_of_redirect_is_followed_and_checked(serve: Any, status: str) -> None:
    good = serve(plain(DATA))
    assert fetch(serve(plain(b"", status, f"Location: {good.url()}")).url(), "image", SMALL).data == DATA
    for target in ("file:///etc/passwd", "data:image/png;base64,aaaa", "ftp://x.test/", "//user@127.0.0.1/", ""):
        away = serve(plain(b"", status, f"Location: {target}" if target else "X: y"))
        with pytest.raises(FetchError):
            fetch(away.url(), "image", SMALL)
        assert len(away.requests) == 1
    # The host of the next hop is checked like the first.
    elsewhere = serve(plain(b"", status, f"Location: {good.url(host='localhost')}"))
    with pytest.raises(FetchError, match="allowed_media_domains"):
        fetch(elsewhere.url(), "image", FetchRules.of("", ["127.0.0.1"], MediaLimits()))
    assert len(good.requests) == 1


@pytest.mark.usefixtures("private")
@pytest.mark.case(3)
def test_a_circle_of_redirects_ends(serve: Any) -> None:
    """Three times round, and no more, whether it leads to itself or to and fro."""
    own = serve(plain(b"", "302 Found", "Location: /p.png"))
    there = serve(lambda link, head: plain(b"", "307 Temporary", f"Location: {own_and_back.url()}")(link, head))
    own_and_back = serve(plain(b"", "308 Permanent", f"Location: {there.url()}"))
    for first in (own, own_and_back):
        with pytest.raises(FetchError, match="more than 3"):
            fetch(first.url(), "image", SMALL)
    assert len(own.requests) == 4
    assert (len(own_and_back.requests), len(there.requests)) == (2, 2)


@pytest.mark.usefixtures("private")
@pytest.mark.case(3)
def test_a_page_that_sends_browsers_on_sends_nobody_on(serve: Any) -> None:
    """A page, or a field that browsers know, is content: no picture, and nothing to follow."""
    canary = serve(plain(DATA))
    page = f'<html><head><meta http-equiv="refresh" content="0; url={canary.url()}"></head></html>'.encode()
    lure = serve(plain(page, "200 OK", f"Refresh: 0; url={canary.url()}", f"Link: <{canary.url()}>; rel=canonical"))
    assert fetch(lure.url(), "image", SMALL).data == page
    with pytest.raises(DecodeError):
        pipes.ask(pipes.make("llava"), "llava", [lure.url()])
    # A place to go to that comes with an ordinary answer is none.
    assert fetch(serve(plain(DATA, "200 OK", f"Location: {canary.url()}")).url(), "image", SMALL).data == DATA
    assert canary.requests == []


@pytest.mark.usefixtures("private")
@pytest.mark.case(6)
def test_too_much_is_cut_off(serve: Any) -> None:
    def endless(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            connection.sendall(b"y" * 1000)

    with pytest.raises(LimitError, match="4000"):
        fetch(serve(endless).url(), "image", SMALL)
    with pytest.raises(LimitError, match="5000"):
        fetch(serve(plain(b"z" * 5000)).url(), "image", SMALL)

    def more(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc" + b"d" * 3000)

    assert fetch(serve(more).url(), "image", SMALL).data == b"abc", "what is beyond the length is not read"
    for length in ("-1", "3, 4", "x", "9" * 30):
        answer = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\nabc".encode()
        server = serve(lambda link, _, answer=answer: link.sendall(answer))
        with pytest.raises((FetchError, LimitError)):
            fetch(server.url(), "image", SMALL)

    def short(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\nabc")

    with pytest.raises(FetchError):
        fetch(serve(short).url(), "image", SMALL)
    for status in ("404 Not Found", "500 Oops", "204 No Content"):
        with pytest.raises(FetchError, match=status[:3]):
            fetch(serve(plain(b"", status)).url(), "image", SMALL)
    with pytest.raises(FetchError, match="nothing"):
        fetch(serve(plain(b"")).url(), "image", SMALL)


# A mebibyte that unfolds to a gibibyte, and frames of Brotli and Zstandard by hand, of which no decoder is needed here.
BOMBS = {
    "gzip": gzip.compress(bytes(1 << 20)) * 1024,
    "x-gzip": gzip.compress(bytes(1 << 20)),
    "deflate": zlib.compress(bytes(1 << 20)),
    "br": b"\xcb\xff\xff\xff\xff\xff\xff\x3f\x00" * 100,
    "zstd": b"\x28\xb5\x2f\xfd\xa4\x00\x00\x00\x40" + b"\x02\x00\x10\x00" * 8191 + b"\x03\x00\x10\x00",
    "GZIP, br": gzip.compress(bytes(1 << 20)),
}


@pytest.mark.usefixtures("private")
@pytest.mark.case(6)
@pytest.mark.parametrize("coding", sorted(BOMBS))
def test_folded_bodies_are_refused_unread(serve: Any, coding: str) -> None:
    """None is asked for, none is unfolded, and no byte is read of one that comes nevertheless."""
    server = serve(plain(BOMBS[coding], "200 OK", f"Content-Encoding: {coding}"))
    with peak() as above, pytest.raises(FetchError, match="compressed"):
        fetch(server.url(), "image", LARGE)
    assert above[0] < 8 << 20
    assert b"\r\naccept-encoding: identity\r\n" in server.requests[0].lower()
    # As a coding of the transfer, which HTTP knows as well.
    body = BOMBS[coding][:1000]
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: %s, chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    answer = chunked % (coding.encode(), len(body), body)
    server = serve(lambda link, _: link.sendall(answer))
    with pytest.raises(FetchError):
        fetch(server.url(), "image", LARGE)


@pytest.mark.usefixtures("private")
@pytest.mark.case(6)
@pytest.mark.parametrize("told", ["chunks", "nothing"])
def test_what_is_cut_off_takes_no_more_than_the_limit(serve: Any, told: str) -> None:
    """Four mebibytes of 64 that come: less than 8 MiB more are held, in the best of some rounds."""
    piece = bytes(1 << 16)
    head = {
        "chunks": b"Transfer-Encoding: chunked\r\n",
        "nothing": b"",
    }

    def endless(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + head[told] + b"\r\n")
        for _ in range(1024):
            connection.sendall(b"10000\r\n" + piece + b"\r\n" if told == "chunks" else piece)

    taken: list[int] = []
    while len(taken) < 5 and (not taken or min(taken) >= 8 << 20):
        with peak() as above, pytest.raises(LimitError, match=str(4 << 20)):
            fetch(serve(endless).url(), "image", LARGE)
        taken.append(above[0])
    assert min(taken) < 8 << 20, taken


_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
# What an answer begins with, and how it goes on without an end.
TINY = {
    "chunks": (_CHUNKED, b"1\r\nx\r\n" * 10_000, "pieces"),
    "interim answers": (b"", b"HTTP/1.1 102 a\r\n\r\n" * 5_000, "headers"),
    "header lines": (_OK, b"a: b\r\n" * 10_000, "headers"),
    "trailer lines": (_CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000, "without content"),
    "a chunk's extension": (_CHUNKED + b"1;", b"a" * 60_000, "without content"),
}


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("name", TINY)
def test_89_what_comes_in_tiny_pieces_keeps_nobody_waiting(serve: Any, name: str) -> None:
    """Thirty-two at a time; before there were turns and bounds, they held the event loop for 5 to 15 s."""
    first, again, words = TINY[name]

    def endless(connection: socket.socket, head: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(first)
            while True:
                connection.sendall(again)

    server = serve(endless)
    assert fetch(serve(plain(DATA)).url(), "image", SMALL).data == DATA

    async def late_s() -> float:
        late: list[float] = []

        async def watch() -> None:
            while True:
                due = time.monotonic() + 0.005
                await asyncio.sleep(0.005)
                late.append(time.monotonic() - due)

        watching = asyncio.ensure_future(watch())
        media = [MediaRef("video", server.url(f"/{number}")) for number in range(32)]
        with pytest.raises(FetchError, match=words):
            async with Fetcher(LARGE).fetched(media):
                pass
        watching.cancel()
        return max(late)

    bound = 0.15 * slowness()
    assert best(lambda: asyncio.run(late_s()), bound, 4) < bound


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("size", [1, 100, 128, 1000, 40_000])
def test_89_bodies_in_ordinary_chunks_are_read(serve: Any, size: int) -> None:
    """A few tiny ones, and any number of larger ones; interim answers and many headers before them are skipped."""
    data = bytes(range(256)) * (4 if size == 1 else 4000)

    def answer(connection: socket.socket, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 20)
        connection.sendall(_OK + b"X-Padding: aaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 300)
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        pieces = (data[start : start + size] for start in range(0, len(data), size))
        connection.sendall(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces))
        connection.sendall(b"0\r\nTrailer: a\r\n\r\n")

    if size == 100:
        with pytest.raises(FetchError, match="fewer than 128"):
            fetch(serve(answer).url(), "image", LARGE)
    else:
        assert fetch(serve(answer).url(), "image", LARGE).data == data
