"""A client of a server with OpenAI's API: its address, key, reachability and model name."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from beheld.cli.terminal import shown
from beheld.core.errors import BeheldError, ConfigError

if TYPE_CHECKING:
    import httpx

# A live server lists its models at once, under any load.
_PROBE_S = 10.0
_OTHER = "Start `beheld serve`, or name another --url."
# Longest error message shown, in characters.
_MAX_WORDS = 1000


def address(url: str) -> str:
    """Return the URL that ends with /v1, the root of the API.

    Raises:
        ConfigError: the URL is invalid.
    """
    at = url.rstrip("/")
    try:
        parts = urlsplit(at)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or not at.isprintable() or set(at) & set(" ?#@\\"):
        raise ConfigError(
            f"{url[:128]!r} is no address of a server.", "Give one as http://127.0.0.1:8000 or https://...", param="url"
        )
    return at if at.endswith("/v1") else at + "/v1"


def key_of(given: str | None) -> str:
    """Return the API key to send."""
    return given or os.environ.get("OPENAI_API_KEY") or "EMPTY"


def connected(at: str, key: str) -> httpx.Client:
    """Return an HTTP client of the server at `at` (see `address`). Only connecting has a short timeout.

    Raises:
        ConfigError: the key is not valid in a header.
    """
    import httpx

    if not (key.isascii() and key.isprintable()):
        raise ConfigError("The API key holds characters that no header may have.", "Check it.", param="api_key")
    return httpx.Client(
        base_url=at,
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(None, connect=_PROBE_S),
        trust_env=False,
    )


def first_model(client: httpx.Client) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: the server does not answer, refuses, or does not speak OpenAI's API.
    """
    import httpx

    at = str(client.base_url).rstrip("/")
    try:
        shown = client.get("/models", timeout=_PROBE_S)
    except httpx.TimeoutException as error:
        raise ConfigError(f"{at} is silent for {_PROBE_S:g} seconds.", _OTHER, param="url") from error
    except (httpx.ConnectError, httpx.InvalidURL, UnicodeError) as error:
        trusted = " with a certificate that is trusted" if at.startswith("https") else ""
        raise ConfigError(f"Nothing answers at {at}{trusted}.", _OTHER, param="url") from error
    except httpx.HTTPError as error:
        raise ConfigError(f"What answers at {at} does not speak HTTP.", _OTHER, param="url") from error
    if shown.status_code != 200:
        raise refusal(shown.status_code, shown.content, f"{at}/models")
    try:
        name = json.loads(shown.content)["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ConfigError(f"What answers at {at} does not speak OpenAI's API.", _OTHER, param="url")
    return name


def refusal(status: int, body: bytes, at: str) -> BeheldError:
    """Make the error of a refused request to `at`, with the server's message if it sent one."""
    said = words_of(body)
    return ConfigError(said) if said else ConfigError(f"{at} was answered with status {status}.", _OTHER, param="url")


def words_of(body: bytes) -> str | None:
    """Return the message of an OpenAI API error, safe to print on a terminal."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return shown(said[:_MAX_WORDS]) if isinstance(said, str) else None
