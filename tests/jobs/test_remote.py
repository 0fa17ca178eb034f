"""The input of a job that is kept elsewhere: read by lines, its errors in words. Needs pyarrow, which Ray brings."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from beheld.cli.main import main
from beheld.core.errors import ConfigError
from beheld.jobs.items import Item, read_items
from beheld.jobs.remote import is_remote, opener

LINE = '{{"custom_id": "{}", "method": "POST", "url": "/v1/completions", "body": {{"prompt": "A"}}}}\n'
CONTENT = "".join(LINE.format(number) for number in range(3000)).encode()


class Bucket(BaseHTTPRequestHandler):
    """A bucket with one object, in the form that S3 answers; signatures are not checked."""

    def log_message(self, *words: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer(CONTENT, send=False)

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if asked is None:
            self._answer(CONTENT)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        self._answer(CONTENT[int(first) : int(last) + 1], int(first))

    def _answer(self, body: bytes, first: int | None = None, *, send: bool = True) -> None:
        if not self.path.startswith("/bucket/in.jsonl"):
            body, first = b"", None
            self.send_response(404)
        else:
            self.send_response(200 if first is None else 206)
        if first is not None:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        if send:
            self.wfile.write(body)


@pytest.fixture
def options() -> Iterator[str]:
    """What follows an address for pyarrow to ask the bucket of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"?scheme=http&endpoint_override=127.0.0.1%3A{server.server_port}&region=us-east-1"
        server.shutdown()


def test_an_object_of_a_bucket_is_read_line_by_line(options: str) -> None:
    pytest.importorskip("pyarrow")
    open_, size = opener(f"s3://key:secret@bucket/in.jsonl{options}")
    assert size == len(CONTENT)
    for _ in range(2):
        found = list(read_items("s3://bucket/in.jsonl", open_))
        assert [item.custom_id for item in found if isinstance(item, Item)] == [str(number) for number in range(3000)]


def test_what_is_not_there_is_named(options: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match=r"no file 's3://bucket/other\.jsonl"):
        opener(f"s3://key:secret@bucket/other.jsonl{options}")
    with pytest.raises(ConfigError, match="no file 'file://"):
        opener(tmp_path.as_uri())
    with pytest.raises(ConfigError, match=r"'nosuch://bucket/in\.jsonl' cannot be read"):
        opener("nosuch://bucket/in.jsonl")


def test_no_error_shows_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lost() -> Any:
        raise OSError("s3://key:secret@bucket/in.jsonl went away")

    with pytest.raises(ConfigError, match=r"'s3://bucket/in\.jsonl' cannot be read: s3://bucket/in") as caught:
        list(read_items("s3://key:secret@bucket/in.jsonl", lost))
    assert "secret" not in str(caught.value)
    assert main(["batch", "s3://key:secret@bucket/in", str(tmp_path / "out"), "--prompt", "What?"]) == 1
    shown = capsys.readouterr().err
    assert "'s3://bucket/in' cannot be asked" in shown
    assert "secret" not in shown


def test_without_pyarrow_one_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'beheld\[ray\]'"):
        opener("s3://bucket/in.jsonl")


def test_a_question_about_media_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "s3://bucket/in", str(tmp_path / "out"), "--prompt", "What?", "--device", "cpu"]) == 1
    assert "media at 's3://bucket/in' cannot be asked" in capsys.readouterr().err


def test_an_address_is_no_path() -> None:
    assert is_remote("s3://bucket/in.jsonl")
    assert not is_remote("/folder/in.jsonl")
    assert not is_remote("C:/in.jsonl")
