"""From a URL or a path to bytes: the one place that opens either, and where every guard on doing so lives."""

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
from urllib.parse import unquote, urljoin, urlsplit

from beheld.core.config import MediaLimits
from beheld.core.errors import FetchError, LimitError
from beheld.inputs.fetch.shares import Shares
from beheld.utils import env
from beheld.utils.pace import Pace, paced

MAX_REDIRECTS = 3
# Characters of a URL or a path: far more than any server takes.
MAX_URL = 16 << 10
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_DATA = re.compile(r"data:([\w.+/-]*)((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.ASCII | re.IGNORECASE)
# Characters, a multiple of four.
_BASE64_STEP = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """Bytes, in one word where they came from ("url", "data URL" or "path"), and the milliseconds that it took."""

    data: bytes
    source: str
    milliseconds: float = 0.0


@dataclass(frozen=True)
class FetchRules:
    """What may be opened.

    Attributes:
        root: folder below which paths in URLs and strings may be read; None allows none.
        domains: host names that may be asked; None allows all public ones.
        limits: sizes.
    """

    root: Path | None = None
    domains: frozenset[str] | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)

    @classmethod
    def of(cls, root: str, domains: Iterable[str] | None, limits: MediaLimits) -> FetchRules:
        """From the words of EngineArgs."""
        allowed = None if domains is None else frozenset(name.lower() for name in domains)
        return cls(Path(root).expanduser() if root else None, allowed, limits)


def fetch(source: str | Path, modality: str, rules: FetchRules) -> Fetched:
    """The bytes of a URL, a data URL or a path.

    A `Path` comes from the program itself and is opened as it is; a string may come from anyone and follows the rules.

    Raises:
        FetchError: it may not be opened, or could not be.
        LimitError: it is larger than the limits allow.
    """
    if isinstance(source, Path):
        return Fetched(_read_file(source.expanduser(), None, rules.limits), "path")
    if source[:5].lower() == "data:":
        return Fetched(_read_data(source, rules.limits), "data URL")
    check_length(source)
    if is_remote(source):
        # In a thread of its own, because the caller's may have an event loop already.
        with ThreadPoolExecutor(1, thread_name_prefix="beheld-fetch") as thread:
            return thread.submit(asyncio.run, fetch_remote(source, modality, rules)).result()
    if source[:5].lower() == "file:":
        return Fetched(_read_allowed(_file_url_path(source), rules), "path")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)
    if scheme:
        raise FetchError(f"URLs of the scheme {scheme[1]!r} cannot be fetched.", "Use http, https, data or file.")
    if not source.strip():
        raise FetchError("The URL is empty.", "Give one of http, https or data.")
    return Fetched(_read_allowed(source, rules), "path")


def is_remote(source: object) -> bool:
    """True for a URL that another machine is asked for."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def check_length(url: str) -> None:
    """Refuse a URL or a path, other than a data URL, that is too long to be one, before anything looks at its letters.

    Raises:
        FetchError: it is.
    """
    if len(url) > MAX_URL:
        raise FetchError(
            f"The URL has {len(url)} characters; at most {MAX_URL} are taken.",
            "Give the item itself, as a data URL or the like.",
        )


async def fetch_remote(
    url: str,
    modality: str,
    rules: FetchRules,
    shares: Shares | None = None,
) -> Fetched:
    """The bytes of an http or https URL. Cancelling it hangs up.

    Args:
        url: see `is_remote`.
        modality: decides how long it may take.
        rules: what may be opened.
        shares: in what all fetches of an event loop share; None if it is alone.

    Raises:
        FetchError: it may not be fetched, could not be, or took too long.
        LimitError: it is larger than the limits allow.
    """
    check_length(url)
    begin = asyncio.get_running_loop().time()
    try:
        async with paced(*times_s(modality)) as pace:
            data = await _read_http(url, rules, shares or Shares(), pace)
    except TimeoutError as error:
        raise FetchError(
            "The server took too long.",
            "Try again, or give the item itself, as a data URL or the like.",
            or_engine=f"raise BEHELD_{modality.upper()}_FETCH_TIMEOUT",
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
    try:
        data = _from_base64(url, start)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise FetchError(
            "The data URL is not valid base64.", "Encode the file with standard base64.", stage="data"
        ) from error
    if not data:
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
        raise FetchError("The file URL names another host.", "Use file:///path.")
    return unquote(parts.path)


def _read_allowed(path: str, rules: FetchRules) -> bytes:
    """A file below the allowed root.

    The path is made real first, so that links inside the root work; then every step from the root down is opened
    without following links, so that nothing swapped in meanwhile leads out of it.
    """
    if rules.root is None:
        # What begins as no path does was hardly meant as one.
        meant = path[:1] in ("/", ".", "~")
        raise FetchError(
            "Local files may not be read." if meant else "This is no URL, and local files may not be read.",
            "Give the file itself: as a data URL, or opened." if meant else "Use http, https or data.",
            or_engine="set allowed_local_media_path to the folder whose files may be read",
        )
    if "\0" in path:
        raise FetchError("The path holds a NUL character.")
    root, real = _real(rules.root), _real(path)
    if not real.is_relative_to(root) or real == root:
        raise FetchError(
            "The file is not below allowed_local_media_path.",
            "Give the item itself, as a data URL or the like.",
            or_engine="name another folder",
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
    """A plain file; `folder` is the open folder it must lie in, if links may not be followed."""
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
    """The path with all links followed; what of it does not exist stays as it is."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # A link that goes away between the look at it and its reading.
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
        # It takes as long as a hundred small requests, and the event loop is theirs.
        await asyncio.to_thread(import_module, "beheld.inputs.fetch.pinned_http")
    from beheld.inputs.fetch import pinned_http, url_mirror

    for _ in range(MAX_REDIRECTS + 1):
        place = pinned_http.parse(url)
        if rules.domains is not None and place.host not in rules.domains:
            raise FetchError(
                f"The host {place.host!r} is not among allowed_media_domains.",
                "Give the item itself, as a data URL or the like.",
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
    """Seconds a fetch may take in all, redirects included: if hardly anything comes, and as long as it comes."""
    if modality == "video":
        said = env.VIDEO_FETCH_TIMEOUT()
        return (10.0, 30.0) if said is None else (said, said)
    seconds = {"image": env.IMAGE_FETCH_TIMEOUT, "audio": env.AUDIO_FETCH_TIMEOUT}[modality]()
    return seconds, seconds
