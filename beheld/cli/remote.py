"""A server that speaks OpenAI's API: its address, whether it answers, and what it calls its model."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from beheld.cli.terminal import shown
from beheld.core.errors import BeheldError, ConfigError

if TYPE_CHECKING:
    import httpx

# A server that is alive tells of its models at once, whatever else it has to do.
_PROBE_S = 10.0
_OTHER = "Start `beheld serve`, or name another --url."
# Characters of what a server says of an error.
_MAX_WORDS = 1000


def address(url: str) -> str:
    """The address that ends with /v1, below which the API lies.

    Raises:
        ConfigError: it is no address of a server.
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
    """The API key to show."""
    return given or os.environ.get("OPENAI_API_KEY") or "EMPTY"


def connected(at: str, key: str) -> httpx.Client:
    """A client of the server at `at`, an `address`. Answers may take their time; only connecting may not.

    Raises:
        ConfigError: the key cannot be sent.
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
    """The first model that the server tells of.

    Raises:
        ConfigError: it does not answer, refuses, or does not speak OpenAI's API.
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
    """What became of a request to `at`: in the server's own words, where it has any."""
    said = words_of(body)
    return ConfigError(said) if said else ConfigError(f"{at} was answered with status {status}.", _OTHER, param="url")


def words_of(body: bytes) -> str | None:
    """What an error of OpenAI's API says, as it may be shown on a terminal."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return shown(said[:_MAX_WORDS]) if isinstance(said, str) else None
