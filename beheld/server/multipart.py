"""Parses a form (multipart/form-data, RFC 7578) that has arrived as a whole, within limits.

    --boundary CRLF
    Content-Disposition: form-data; name="model" CRLF CRLF
    tiny CRLF
    --boundary CRLF
    Content-Disposition: form-data; name="file"; filename="a.wav" CRLF CRLF
    ... bytes ... CRLF
    --boundary--

Contents are searched for the next boundary and copied window by window, whatever they hold: so no content costs more
than its bytes, and other threads run between two windows. `mmap.find` would compare a boundary at each place anew, and
keep the interpreter for seconds where a content nearly holds it again and again.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from mmap import mmap

from beheld.server.errors import HttpError

MAX_PARTS = 128
MAX_HEADER_BYTES = 4096
MAX_TEXT_BYTES = 64 << 10
_MAX_BOUNDARY = 70
# Bytes that one step looks at.
_WINDOW = 256 << 10
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.ASCII | re.IGNORECASE)
_HEADER = re.compile(rb"([!-9;-~]+):[ \t]*([^\r\n]*)")
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)
_PLAIN_ENCODINGS = ("", "7bit", "8bit", "binary")


@dataclass(frozen=True)
class Part:
    """One field of a form: its name, and its content; a file has a file name, which may be empty."""

    name: str
    content: bytes
    filename: str | None = None

    def text(self) -> str:
        """The content of a field that is no file.

        Raises:
            HttpError: 400; it is too long, or not UTF-8.
        """
        if len(self.content) > MAX_TEXT_BYTES:
            raise HttpError(400, f"The field has more than {MAX_TEXT_BYTES} bytes.", "Shorten it.", param=self.name)
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise HttpError(400, "The field is not UTF-8.", "Encode it so.", param=self.name) from error


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names.

    Raises:
        HttpError: 415; it is not that of a form. 400; it names none.
    """
    if content_type.split(";")[0].strip().lower() != "multipart/form-data":
        raise HttpError(415, "The body must be a form.", "Send it as multipart/form-data, with the audio as file.")
    found = _BOUNDARY.search(content_type)
    boundary = (found[1] or found[2]) if found else ""
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise _malformed("its Content-Type names no boundary")
    return boundary.encode()


def parse(body: bytes | bytearray | mmap, boundary: bytes) -> list[Part]:
    """The fields of a form, in order.

    Raises:
        HttpError: 400; it is malformed, or has too many fields.
    """
    border = b"--" + boundary
    if body[: len(border)] != border:
        raise _malformed("it does not start with its boundary")
    parts: list[Part] = []
    place = len(border)
    while body[place : place + 2] != b"--":
        if body[place : place + 2] != b"\r\n":
            raise _malformed("no line break follows a boundary")
        if len(parts) == MAX_PARTS:
            raise HttpError(400, f"The form has more than {MAX_PARTS} fields.", "Send fewer.")
        # The line break before the headers is part of what may end them: a part may have none.
        close = body.find(b"\r\n\r\n", place, place + MAX_HEADER_BYTES + 4)
        if close < 0:
            raise _malformed(f"a field's headers do not end within {MAX_HEADER_BYTES} bytes")
        begin = close + 4
        end = _found(body, b"\r\n" + border, begin)
        if end < 0:
            raise _malformed("its last boundary is missing")
        name, filename = _named(bytes(body[place + 2 : close]))
        parts.append(Part(name, _copied(body, begin, end), filename))
        place = end + 2 + len(border)
    return parts


def _found(body: bytes | bytearray | mmap, words: bytes, start: int) -> int:
    """The first place from `start` on at which the words stand; -1 if there is none."""
    over = len(words) - 1
    for begin in range(start, len(body), _WINDOW):
        # A copy, because bytes are searched in linear time.
        place = bytes(body[begin : begin + _WINDOW + over]).find(words)
        if place >= 0:
            return begin + place
    return -1


def _copied(body: bytes | bytearray | mmap, start: int, stop: int) -> bytes:
    """The bytes between two places."""
    if stop - start <= _WINDOW:
        return bytes(body[start:stop])
    content = io.BytesIO()
    for begin in range(start, stop, _WINDOW):
        content.write(body[begin : min(begin + _WINDOW, stop)])
    return content.getvalue()


def _named(headers: bytes) -> tuple[str, str | None]:
    """The field's name, and its file name if it is a file."""
    found: dict[str, str] = {}
    for line in headers.split(b"\r\n"):
        header = _HEADER.fullmatch(line)
        if header is None:
            raise _malformed("a field's header is none")
        found[header[1].decode("ascii").lower()] = header[2].decode("utf-8", "replace")
    if found.get("content-transfer-encoding", "").strip().lower() not in _PLAIN_ENCODINGS:
        raise _malformed("a field is encoded")
    disposition = found.get("content-disposition", "")
    names = {key.lower(): value for key, value in _PARAMETER.findall(disposition)}
    if disposition.split(";")[0].strip().lower() != "form-data" or not names.get("name"):
        raise _malformed("a field has no name")
    return names["name"], names.get("filename")


def _malformed(why: str) -> HttpError:
    return HttpError(400, f"The form cannot be read: {why}.", "Send multipart/form-data as RFC 7578 has it.")
