"""Fetching: every guard, against servers on the loopback address only."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld.core.config import MediaLimits
from beheld.core.errors import FetchError, LimitError
from beheld.inputs import dial
from beheld.inputs.fetch import FetchRules, fetch
from tests import tiny
from tests.inputs import pipes

Answer = Callable[[socket.socket, bytes], None]
DATA = b"x" * 1000
SMALL = FetchRules(limits=MediaLimits(max_item_bytes=4000))


class Server:
    """Answers each connection on a loopback port with a function of its own; counts and keeps the requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.requests: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str = "/p.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    more = connection.recv(4096)
                    if not more:
                        return
                    head += more
                self.requests.append(head)
                self._answer(connection, head)
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()


def plain(body: bytes, status: str = "200 OK", *fields: str) -> Answer:
    def answer(connection: socket.socket, _: bytes) -> None:
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *fields]
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    return answer


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def make(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")


@pytest.mark.usefixtures("private")
def test_a_plain_answer(serve: Any) -> None:
    server = serve(plain(DATA))
    assert fetch(server.url("/a b.png".replace(" ", "%20") + "?x=1&y=%2F"), "image", SMALL).data == DATA
    assert server.requests[0].startswith(b"GET /a%20b.png?x=1&y=%2F HTTP/1.1\r\n")
    assert b"127.0.0.1:" in server.requests[0]


@pytest.mark.case(1, 2)
def test_private_addresses_are_never_dialled(serve: Any) -> None:
    server = serve(plain(DATA))
    hosts = [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[fec0::1]",
        "[fe80::1]",
        "[ff02::1]",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "１２７.0.0.1",
        "localhost.",
        "LOCALHOST",
    ]
    for host in hosts:
        begin = time.perf_counter()
        with pytest.raises(FetchError):
            fetch(server.url(host=host), "image", SMALL)
        assert time.perf_counter() - begin < 2.0, host
    assert server.requests == []


@pytest.mark.case(2)
def test_ambiguous_urls_are_refused() -> None:
    for url in (
        "http://user@127.0.0.1/",
        "http://a:b@example.test/",
        "http://example.test\\@127.0.0.1/",
        "http://exa mple.test/",
        "http://example.test/\r\nHost: x",
        "http:///path",
        "http://example.test:99999/",
        "http://[::1/",
        "ftp://example.test/x",
        "gopher://example.test/",
        "http://",
    ):
        with pytest.raises(FetchError):
            fetch(url, "image", SMALL)


@pytest.mark.usefixtures("private")
@pytest.mark.case(4)
def test_the_checked_address_is_the_one_dialled(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One resolution per hop; any bad address among several refuses the host."""
    server = serve(plain(DATA))
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **named: Any) -> Any:
        if host == "pictures.test":
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        return real(host, port, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert fetch(server.url(host="pictures.test"), "image", SMALL).data == DATA
    assert asked == ["pictures.test"]
    assert f"Host: pictures.test:{server.port}".encode() in server.requests[0]
    monkeypatch.delenv("BEHELD_ALLOW_PRIVATE_FETCH")
    mixed = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ("93.184.216.34", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: mixed)
    with pytest.raises(FetchError, match="not public"):
        dial.address_of("pictures.test", 80)


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
    for target in ("file:///etc/passwd", "data:image/png;base64,aaaa", "ftp://x.test/", ""):
        away = serve(plain(b"", "301 Moved", f"Location: {target}" if target else "X: y"))
        with pytest.raises(FetchError):
            fetch(away.url(), "image", SMALL)
    canary = serve(plain(DATA))
    lure = serve(plain(b"", "307 Temporary Redirect", f"Location: {canary.url()}"))
    monkeypatch.setattr(dial, "is_public", lambda address: False)
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    real = dial.address_of
    calls: list[int] = []

    def second_hop_is_checked(host: str, port: int) -> str:
        calls.append(port)
        if len(calls) > 1:
            monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "0")
        return real(host, port)

    monkeypatch.setattr(dial, "address_of", second_hop_is_checked)
    with pytest.raises(FetchError, match="not public"):
        fetch(lure.url(), "image", SMALL)
    assert calls == [lure.port, canary.port]
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
    with pytest.raises(FetchError, match="compressed"):
        fetch(serve(plain(DATA, "200 OK", "Content-Encoding: gzip")).url(), "image", SMALL)

    def short(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\nabc")

    with pytest.raises(FetchError):
        fetch(serve(short).url(), "image", SMALL)
    for status in ("404 Not Found", "500 Oops", "204 No Content"):
        with pytest.raises(FetchError, match=status[:3]):
            fetch(serve(plain(b"", status)).url(), "image", SMALL)
    with pytest.raises(FetchError, match="nothing"):
        fetch(serve(plain(b"")).url(), "image", SMALL)


@pytest.mark.usefixtures("private")
@pytest.mark.case(7)
def test_slow_servers_end_at_the_deadline(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_IMAGE_FETCH_TIMEOUT", "0.4")

    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
        for _ in range(100):
            connection.sendall(b".")
            time.sleep(0.05)

    def slow_head(connection: socket.socket, _: bytes) -> None:
        for _ in range(100):
            connection.sendall(b"X")
            time.sleep(0.05)

    def hold(connection: socket.socket, _: bytes) -> None:
        connection.recv(1)

    for answer in (drip, slow_head, hold):
        begin = time.perf_counter()
        with pytest.raises(FetchError):
            fetch(serve(answer).url(), "image", SMALL)
        assert time.perf_counter() - begin < 2.0


@pytest.mark.usefixtures("private")
@pytest.mark.case(5)
def test_no_proxy_and_no_credentials(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    proxy = serve(plain(b"from the proxy"))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url(""))
    server = serve(plain(DATA))
    assert fetch(server.url(), "image", SMALL).data == DATA
    assert b"uthorization" not in server.requests[0]
    assert proxy.requests == []


@pytest.mark.usefixtures("private")
@pytest.mark.case(2)
def test_only_allowed_domains(serve: Any) -> None:
    server = serve(plain(DATA))
    rules = FetchRules.of("", ["Pictures.test"], MediaLimits())
    with pytest.raises(FetchError, match="allowed_media_domains"):
        fetch(server.url(), "image", rules)
    assert server.requests == []
    assert fetch(server.url(), "image", FetchRules.of("", ["127.0.0.1"], MediaLimits())).data == DATA


@pytest.mark.usefixtures("private")
def test_a_url_as_a_picture(serve: Any) -> None:
    picture = tiny.picture(84, 56, 1)
    server = serve(plain(pipes.encoded(picture), "200 OK", "Content-Type: text/html"))
    request = pipes.ask(pipes.make("llava"), "llava", [server.url()])
    assert request.receipts[0].given["source"] == "url"
    assert "fetch" in request.receipts[0].milliseconds


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64",
        "data:image/png,abcd",
        "data:image/png;base64,",
        "data:image/png;base64,ab d",
        "data:image/png;base64,abcd=",
        "data:image/png;base64,ab\nd",
        "data:image/png;base64,äöü=",
        "data:image/png;base64,YWJ%3D",
        "data:image/png;base64,YWJj====",
        "data:image/png;x;base64,YWJj",
    ],
)
@pytest.mark.case(12)
def test_malformed_data_urls_are_refused(url: str) -> None:
    with pytest.raises(FetchError):
        fetch(url, "image", SMALL)


def test_data_urls() -> None:
    text = base64.b64encode(DATA).decode()
    for url in (f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}", f"data:image/png;charset=x;base64,{text}"):
        assert fetch(url, "image", SMALL).data == DATA
    with pytest.raises(LimitError):
        fetch("data:image/png;base64," + "a" * 8000, "image", SMALL)


@pytest.mark.case(10)
def test_paths_follow_the_rules(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "inner").mkdir(parents=True)
    outside.mkdir()
    (root / "inner" / "a.png").write_bytes(DATA)
    (outside / "b.png").write_bytes(DATA)
    (root / "link.png").symlink_to(outside / "b.png")
    (root / "near.png").symlink_to(root / "inner" / "a.png")
    (root / "out").symlink_to(outside)
    os.mkfifo(root / "fifo")
    rules = FetchRules(root, None, MediaLimits(max_item_bytes=4000))
    good = root / "inner" / "a.png"
    for source in (str(good), good.as_uri(), str(root / "near.png"), str(root / "inner" / ".." / "inner" / "a.png")):
        assert fetch(source, "image", rules).data == DATA
        with pytest.raises(FetchError, match="allowed_local_media_path"):
            fetch(source, "image", SMALL)
    for bad in (
        str(outside / "b.png"),
        str(root / "link.png"),
        str(root / "out" / "b.png"),
        str(root / ".." / "outside" / "b.png"),
        str(root),
        str(root / "inner"),
        str(root / "fifo"),
        str(root / "none.png"),
        "/dev/zero",
        "a\0b",
        "file://elsewhere/a.png",
        (outside / "b.png").as_uri(),
    ):
        with pytest.raises(FetchError):
            fetch(bad, "image", rules)


def test_a_path_object_is_the_programs_own(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)
    assert fetch(path, "image", SMALL).data == DATA
    os.mkfifo(tmp_path / "fifo")
    path.with_name("empty").write_bytes(b"")
    path.with_name("large").write_bytes(b"z" * 5000)
    for name in ("fifo", "none", "empty", "."):
        with pytest.raises(FetchError):
            fetch(tmp_path / name, "image", SMALL)
    for large in (path.with_name("large"), Path("/dev/zero")):
        with pytest.raises((LimitError, FetchError)):
            fetch(large, "image", SMALL)
