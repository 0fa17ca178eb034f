"""How a server is reached: TLS, a Unix socket, below a root, and from other sites' pages."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from beheld.core.errors import ConfigError
from beheld.server.listen import address, leave, listen
from beheld.server.options import ServerOptions
from beheld.server.tls import Secure
from tests.server.running import SMALL, Running, received

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4, "temperature": 0}
ORIGIN = "https://example.org"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's certificate for 127.0.0.1, signed by itself; a client's likewise; a key with a password."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:word",
         "-in", folder / "server.key", "-out", folder / "kept.key"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[Running]:
    """Speaks TLS, below a root, to pages of one origin, with a key."""
    running = Running(
        ssl_certfile=str(certificates / "server.pem"),
        ssl_keyfile=str(certificates / "server.key"),
        root_path="/models/vision",
        allowed_origins=(ORIGIN,),
        api_keys=("secret",),
    )
    yield running
    running.close()


def client(certificates: Path, **options: Any) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    return httpx.Client(verify=context, trust_env=False, timeout=30, headers={"x-api-key": "secret"}, **options)


@needs_openssl
def test_an_answer_and_a_stream_over_tls(secure: Running, certificates: Path) -> None:
    with client(certificates) as asked:
        whole = asked.post(f"{secure.url}/v1/chat/completions", json=ASKED)
        assert whole.status_code == 200, whole.text
        with asked.stream("POST", f"{secure.url}/v1/chat/completions", json=ASKED | {"stream": True}) as streamed:
            assert streamed.read().endswith(b"data: [DONE]\n\n")
        image = "A" * (3 << 20)
        refused = asked.post(f"{secure.url}/v1/chat/completions", json=ASKED | {"user": image})
        assert refused.status_code in (200, 400), refused.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{secure.url}/health", trust_env=False)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secure.port}/health", trust_env=False)


@needs_openssl
def test_a_client_that_leaves_over_tls_ends_its_answer(secure: Running, certificates: Path) -> None:
    long = ASKED | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
    with client(certificates) as asked:
        with asked.stream("POST", f"{secure.url}/v1/chat/completions", json=long) as stream:
            next(stream.iter_bytes())
        deadline = time.monotonic() + 20
        while secure.admission.busy and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not secure.admission.busy
        counted = asked.get(f"{secure.url}/metrics").text
    (made,) = re.findall(r"^beheld_answer_tokens_total (\S+)$", counted, re.MULTILINE)
    assert float(made) < 1500


@needs_openssl
def test_routes_below_a_root_and_without_it(secure: Running, certificates: Path) -> None:
    with client(certificates) as asked:
        for root in ("", "/models/vision"):
            assert asked.get(f"{secure.url}{root}/v1/models").json()["data"][0]["id"] == "tiny"
            assert asked.get(f"{secure.url}{root}/").status_code == 200
            assert asked.get(f"{secure.url}{root}/health").status_code == 200
        assert asked.get(f"{secure.url}/models/other/v1/models").status_code == 404
        assert asked.get(f"{secure.url}/models/visionx/v1/models").status_code == 404
        # The key is asked for below the root, too.
        assert asked.get(f"{secure.url}/models/vision/v1/models", headers={"x-api-key": "wrong"}).status_code == 401


@needs_openssl
def test_pages_of_one_origin_may_ask(secure: Running, certificates: Path) -> None:
    leave_asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with client(certificates) as asked:
        url = f"{secure.url}/v1/chat/completions"
        # A browser asks for leave without a key.
        given = asked.options(url, headers={"Origin": ORIGIN, "x-api-key": "", **leave_asked})
        assert given.status_code == 200, given.text
        assert given.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in given.headers["access-control-allow-headers"].lower()
        other = asked.options(url, headers={"Origin": "https://other.org", **leave_asked})
        assert other.status_code == 400
        answer = asked.post(url, json=ASKED, headers={"Origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = asked.post(url, json=ASKED, headers={"Origin": ORIGIN, "x-api-key": "wrong"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-origin" not in asked.post(url, json=ASKED).headers


# Begins a client's first message of TLS.
HALF = bytes.fromhex("160301")


@needs_openssl
def test_137_handshakes_that_do_not_end_leave_room_for_others(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Secure, "most", 32)
    files = {"ssl_certfile": str(certificates / "server.pem"), "ssl_keyfile": str(certificates / "server.key")}
    running = Running("llama", **files)
    try:

        def health(source: str) -> bytes:
            context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
            with context.wrap_socket(running.connect(source=source), server_hostname="127.0.0.1") as link:
                link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return received(link)[:12]

        begun = time.monotonic()
        with ExitStack() as opened:
            links = [opened.enter_context(running.connect()) for _ in range(40)]
            for link in links:
                link.sendall(HALF)
            # Those that began first make room for the others of the same client, and so for one that does shake hands.
            for link in links[:7]:
                assert received(link) == b""
            assert time.monotonic() - begun < running.options.header_s
            # While all places are taken; the next one of the same client makes room for itself.
            assert health("127.0.0.2") == b"HTTP/1.1 200"
            assert health("127.0.0.1") == b"HTTP/1.1 200"
            for link in links[9:]:
                assert received(link) == b""
        assert running.options.header_s <= time.monotonic() - begun < running.options.header_s + 4
        assert health("127.0.0.1") == b"HTTP/1.1 200"
    finally:
        running.close()


@needs_openssl
def test_137_clients_without_names_shake_hands_beside_those_that_do_not(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a Unix socket: they had one place for all of them together, and who came late had none."""
    monkeypatch.setattr(Secure, "most", 8)
    files = {"ssl_certfile": str(certificates / "server.pem"), "ssl_keyfile": str(certificates / "server.key")}
    running = Running("llama", fair_shares=False, header_s=10.0, **files)  # type: ignore[arg-type]
    try:
        with ExitStack() as opened:
            for _ in range(8):
                opened.enter_context(running.connect()).sendall(HALF)
            time.sleep(0.2)
            for _ in range(3):
                assert httpx.get(f"{running.url}/health", verify=False, trust_env=False).status_code == 200
    finally:
        running.close()


@needs_openssl
def test_137_a_handshake_takes_little_memory(secure: Running) -> None:
    """asyncio's own connections of TLS have buffers of 256 KiB from the start."""
    assert httpx.get(f"{secure.url}/models/vision/health", verify=False, trust_env=False).status_code == 200
    tracemalloc.start()
    try:
        with ExitStack() as opened:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(64):
                opened.enter_context(secure.connect()).sendall(HALF)
            time.sleep(0.2)
            each = (tracemalloc.get_traced_memory()[0] - before) / 64
    finally:
        tracemalloc.stop()
    assert 8 << 10 < each < 80 << 10


@needs_openssl
def test_clients_show_certificates(certificates: Path) -> None:
    running = Running(
        ssl_certfile=str(certificates / "server.pem"),
        ssl_keyfile=str(certificates / "server.key"),
        ssl_ca_certs=str(certificates / "client.pem"),
        ssl_cert_reqs=2,
    )
    try:
        context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{running.url}/health", verify=context, trust_env=False)
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        assert httpx.get(f"{running.url}/health", verify=context, trust_env=False).status_code == 200
    finally:
        running.close()


@needs_openssl
@pytest.mark.parametrize(
    ("certificate", "key"),
    [
        ("none.pem", "server.key"),
        ("server.pem", "client.key"),
        ("server.key", "server.key"),
        ("server.pem", "kept.key"),
    ],
)
def test_files_that_do_not_fit_are_told_at_the_start(certificates: Path, certificate: str, key: str) -> None:
    options = replace(SMALL, ssl_certfile=str(certificates / certificate), ssl_keyfile=str(certificates / key))
    with pytest.raises(ConfigError, match="TLS cannot be set up"):
        listen(options)


@needs_openssl
def test_a_missing_file_of_tls_is_named(certificates: Path) -> None:
    options = replace(SMALL, ssl_certfile=str(certificates / "server.pem"), ssl_keyfile=str(certificates / "none.key"))
    with pytest.raises(ConfigError, match=r"there is no file '.*none\.key'. Check --ssl-keyfile"):
        listen(options)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    running = Running(uds=str(path))
    try:
        assert address(running.listener, running.options) == f"the Unix socket {path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=30) as asked:
            answer = asked.post("http://localhost/v1/chat/completions", json=ASKED)
            assert answer.status_code == 200, answer.text
        with pytest.raises(ConfigError, match="Address already in use"):
            listen(running.options)
    finally:
        running.close()
    # What a killed server leaves does not stop the next one.
    assert path.is_socket()
    again = listen(replace(SMALL, uds=str(path)))
    leave(again)
    again.close()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(ConfigError, match="Cannot listen"):
        listen(replace(SMALL, uds=str(path)))
    assert path.read_text() == "a file"


REFUSED: dict[str, dict[str, Any]] = {
    "must begin with a slash": {"root_path": "models/"},
    "TLS needs a certificate": {"ssl_keyfile": "key.pem"},
    "Clients' certificates": {"ssl_certfile": "c.pem", "ssl_cert_reqs": 2},
    "every site act as the user": {"allowed_origins": ("*",), "allow_credentials": True},
    "from 0 to 2": {"ssl_cert_reqs": 3},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_options_that_make_no_sense_are_refused(reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerOptions(**REFUSED[reason])
