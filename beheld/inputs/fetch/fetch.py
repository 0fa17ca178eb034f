"""Reads bytes from a URL or a path; the only code that opens either, with all its safety checks."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TypeGuard
from urllib.parse import unquote, urljoin, urlsplit

from beheld.core.config import MediaLimits
from beheld.core.errors import FetchError, LimitError
from beheld.inputs.fetch.shares import Shares
from beheld.inputs.media import stills
from beheld.utils import env
from beheld.utils.pace import Pace, paced

MAX_REDIRECTS = 3
# The longest URL or path in characters: far more than servers accept.
MAX_URL = 16 << 10
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_DATA = re.compile(r"data:([\w.+/-]*)((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.ASCII | re.IGNORECASE)
# Characters, a multiple of four.
_BASE64_STEP = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """Fetched bytes, their origin ("url", "data URL" or "path"), and the milliseconds it took."""

    data: bytes
    source: str
    milliseconds: float = 0.0


@dataclass(frozen=True)
class FetchRules:
    """The rules on what may be opened.

    Attributes:
        root: the folder below which paths in URLs and strings may be read; None allows none.
        domains: allowed host names; None allows all public ones.
        limits: on sizes.
    """

    root: Path | None = None
    domains: frozenset[str] | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)

    @classmethod
    def of(cls, root: str, domains: Iterable[str] | None, limits: MediaLimits) -> FetchRules:
        """Make the rules from EngineArgs."""
        allowed = None if domains is None else frozenset(name.lower() for name in domains)
        return cls(Path(root).expanduser() if root else None, allowed, limits)


def is_data_url(source: object) -> TypeGuard[str]:
    """Whether a source is a URL that holds its bytes itself."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def fetch(source: str | Path, modality: str, rules: FetchRules) -> Fetched:
    """Return the bytes of a URL, a data URL or a path.

    A `Path` comes from the program and is opened directly; a string may come from a user and follows the rules.

    Raises:
        FetchError: it may not be opened, or could not be.
        LimitError: it exceeds a limit.
    """
    if isinstance(source, Path):
        return Fetched(_read_file(source.expanduser(), None, rules.limits), "path")
    if is_data_url(source):
        return Fetched(_read_data(source, rules.limits), "data URL")
    check_length(source)
    if is_remote(source):
        # In a separate thread, because the caller's may already run an event loop.
        with ThreadPoolExecutor(1, thread_name_prefix="beheld-fetch") as thread:
            return thread.submit(asyncio.run, fetch_remote(source, modality, rules)).result()
    if source[:5].lower() == "file:":
        return Fetched(_read_allowed(_file_url_path(source), rules), "path")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)
    if scheme:
        raise FetchError(f"The URL scheme {scheme[1]!r} is not supported.", "Use http, https, data or file.")
    if not source.strip():
        raise FetchError("The URL is empty.", "Use http, https or data.")
    return Fetched(_read_allowed(source, rules), "path")


def is_remote(source: object) -> bool:
    """Return whether a URL needs a request to another machine."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def check_length(url: str) -> None:
    """Refuse a URL or path that is too long, unless it is a data URL, before it is parsed.

    Raises:
        FetchError: it is too long.
    """
    if len(url) > MAX_URL:
        raise FetchError(
            f"The URL has {len(url)} characters; the limit is {MAX_URL}.",
            "Send the item itself, for example as a data URL.",
        )


async def fetch_remote(
    url: str,
    modality: str,
    rules: FetchRules,
    shares: Shares | None = None,
) -> Fetched:
    """Return the bytes of an http or https URL. Cancelling it closes the connection.

    Args:
        url: see `is_remote`.
        modality: determines the timeout.
        rules: what may be opened.
        shares: in what all fetches of an event loop share; None if it is alone.

    Raises:
        FetchError: it may not be fetched, could not be, or took too long.
        LimitError: it exceeds a limit.
    """
    check_length(url)
    begin = asyncio.get_running_loop().time()
    try:
        async with paced(*times_s(modality)) as pace:
            data = await _read_http(url, rules, shares or Shares(), pace)
    except TimeoutError as error:
        raise FetchError(
            "The server took too long.",
            "Try again, or send the item itself, for example as a data URL.",
            or_engine=f"raise BEHELD_{'IMAGE' if modality == 'document' else modality.upper()}_FETCH_TIMEOUT",
        ) from error
    return Fetched(data, "url", 1e3 * (asyncio.get_running_loop().time() - begin))


# ---------------------------------------------------------------------- data URLs


def _read_data(url: str, limits: MediaLimits) -> bytes:
    head = _DATA.match(url, 0, 512)
    if head is None or head[3] is None:
        raise FetchError(
            "The data URL is malformed.",
            "It must have the form data:image/png;base64,... with standard base64.",
            stage="data",
        )
    start = head.end()
    if (len(url) - start) * 3 // 4 > limits.max_item_bytes:
        raise LimitError(f"The data URL holds more than {limits.max_item_bytes} bytes.", "Send a smaller file.")
    stills_follow = head[1].lower() == "video/jpeg"
    if stills_follow and url.count(",", start) >= limits.max_frames:
        raise LimitError(f"The data URL holds more than {limits.max_frames} frames.", "Send fewer.")
    try:
        frames = url[start:].split(",") if stills_follow else None
        data = _from_base64(url, start) if frames is None else stills.joined([_from_base64(one, 0) for one in frames])
    except (binascii.Error, UnicodeEncodeError) as error:
        raise FetchError(
            "The data URL is not valid base64.", "Encode the file with standard base64.", stage="data"
        ) from error
    if not data or (frames is not None and "" in frames):
        raise FetchError("The data URL is empty.", "Send the file's bytes in it.", stage="data")
    return data


def _from_base64(url: str, start: int) -> bytes:
    """The bytes that a URL holds from `start` on, decoded in steps between which other threads run.

    Raises:
        binascii.Error, UnicodeEncodeError: it is no standard base64.
    """
    # The decoder forgives padding that is too long; and within a text, none may stand where a step ends.
    if (len(url) - start) % 4 or url.endswith("===") or 0 <= url.find("=", start) < len(url) - 2:
        raise binascii.Error
    return b"".join(
        base64.b64decode(url[place : place + _BASE64_STEP].encode("ascii"), validate=True)
        for place in range(start, len(url), _BASE64_STEP)
    )


# ---------------------------------------------------------------------- files


def _file_url_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise FetchError("The file URL has another host.", "Use file:///path.")
    return unquote(parts.path)


def _read_allowed(path: str, rules: FetchRules) -> bytes:
    """Read a file below the allowed root.

    The path is resolved first, so that links inside the root work; then every step from the root down is opened without
    following links, so that a link swapped in meanwhile cannot lead out of it.
    """
    if rules.root is None:
        # A string that does not start like a path was probably not meant as one.
        meant = path[:1] in ("/", ".", "~")
        raise FetchError(
            "Local files may not be read." if meant else "This is not a URL, and local files may not be read.",
            "Send the file itself, as a data URL or opened." if meant else "Use http, https or data.",
            or_engine="set allowed_local_media_path to the folder whose files may be read",
        )
    if "\0" in path:
        raise FetchError("The path holds a NUL character.")
    root, real = _real(rules.root), _real(path)
    if not real.is_relative_to(root) or real == root:
        raise FetchError(
            "The file is not below allowed_local_media_path.",
            "Send the item itself, for example as a data URL.",
            or_engine="set another folder",
        )
    folder = _open(os.fspath(root), os.O_RDONLY | os.O_DIRECTORY, None)
    try:
        for name in real.relative_to(root).parts[:-1]:
            inner = _open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, folder)
            os.close(folder)
            folder = inner
        return _read_file(real, folder, rules.limits)
    finally:
        os.close(folder)


def _read_file(path: Path, folder: int | None, limits: MediaLimits) -> bytes:
    """Read a plain file; with `folder`, an open folder, the file must be in it and links are not followed."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if folder is None else os.O_NOFOLLOW)
    handle = _open(os.fspath(path) if folder is None else path.name, flags, folder)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise FetchError("The path is not a plain file.")
        if status.st_size > limits.max_item_bytes:
            raise LimitError(f"The file has {status.st_size} bytes; the limit is {limits.max_item_bytes}.")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(limits.max_item_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > limits.max_item_bytes:
        raise LimitError(f"The file has more than {limits.max_item_bytes} bytes.")
    if not data:
        raise FetchError("The file is empty.")
    return data


def _real(path: str | Path) -> Path:
    """Return the path with all links followed; parts that do not exist stay unchanged."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # # A link removed between its lookup and its reading.
        raise _unopened(error) from error


def _open(path: str, flags: int, folder: int | None) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    except (OSError, ValueError) as error:
        raise _unopened(error) from error


def _unopened(error: OSError | ValueError) -> FetchError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "invalid path"
    return FetchError(f"The file cannot be opened: {reason}.", "Check the path.")


# ---------------------------------------------------------------------- http


async def _read_http(url: str, rules: FetchRules, shares: Shares, pace: Pace) -> bytes:
    if "beheld.inputs.fetch.pinned_http" not in sys.modules:
        # Parsing takes as long as a hundred small requests, which share the event loop.
        await asyncio.to_thread(import_module, "beheld.inputs.fetch.pinned_http")
    from beheld.inputs.fetch import pinned_http, url_mirror

    for _ in range(MAX_REDIRECTS + 1):
        place = pinned_http.parse(url)
        if rules.domains is not None and place.host not in rules.domains:
            raise FetchError(
                f"The host {place.host!r} is not among allowed_media_domains.",
                "Send the item itself, for example as a data URL.",
                or_engine="add the host to allowed_media_domains",
            )
        copy = url_mirror.find(place)
        if copy is not None:
            own = FetchRules(Path(env.MEDIA_CACHE()).expanduser(), None, rules.limits)
            return await asyncio.to_thread(_read_allowed, copy, own)
        status, location, body = await pinned_http.get(place, rules.limits.max_item_bytes, _REDIRECTS, shares, pace)
        if status not in _REDIRECTS:
            if status != 200:
                raise FetchError(f"The server answered with status {status}.", "Check the URL.")
            if not body:
                raise FetchError("The server sent nothing.", "Check the URL.")
            return body
        if not location:
            raise FetchError("The server redirects to nowhere.")
        url = urljoin(url, location)
        if not is_remote(url):
            raise FetchError("The server redirects to something other than http or https.")
    raise FetchError(f"The server redirects more than {MAX_REDIRECTS} times.")


def times_s(modality: str) -> tuple[float, float]:
    """Return the timeouts in seconds, redirects included: while hardly any data comes, and in total."""
    if modality == "video":
        limit = env.VIDEO_FETCH_TIMEOUT()
        return (10.0, 30.0) if limit is None else (limit, limit)
    known = {"image": env.IMAGE_FETCH_TIMEOUT, "audio": env.AUDIO_FETCH_TIMEOUT, "document": env.IMAGE_FETCH_TIMEOUT}
    seconds = known[modality]()
    return seconds, seconds
