"""What a client and an encoder say to each other: bodies of HTTP messages, without pickle."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.plan import EncodeItem
from beheld.wire.codec import Codec

PATH = "/embeddings"
# The header that names the weights; an encoder refuses another's.
MODEL_HEADER = "X-Beheld-Model"
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Ask:
    """Give the embeddings of these digests if you have them, and of these items in any case."""

    digests: tuple[bytes, ...]
    items: tuple[EncodeItem, ...]


@dataclass(frozen=True, eq=False)
class Found:
    """Embeddings (E, H) for the digests of an Ask, then for its items; None where there are none.

    Attributes:
        embeds: torch tensors; H includes the columns that some families append for later layers.
    """

    embeds: tuple[Any, ...]


CODEC = Codec((Ask, Found, EncodeItem))


def packed(message: Ask | Found) -> bytes:
    """Return the body of a message."""
    return b"".join(CODEC.encode(message))


def unpacked(body: bytes | bytearray) -> Any:
    """Return the message of a body.

    Raises:
        ValueError: the body is malformed.
    """
    return CODEC.decode(body)


def model_of(info: ModelInfo, config: EngineConfig) -> str:
    """Return a name for the weights and their data type: embeddings of equal names may stand in for each other.

    Files count with their names and sizes and with bytes from their beginning, middle and end.
    """
    made = hashlib.sha256(repr((info.architecture, config.dtype, config.quantization)).encode())
    for folder in (Path(info.path), *(Path(part.path) for part in info.secondary)):
        for file in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
            size = file.stat().st_size
            made.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                    opened.seek(start)
                    made.update(opened.read(_SAMPLE_BYTES))
    return made.hexdigest()


def is_token(given: str | None, token: str) -> bool:
    """Return whether an Authorization header has the token; takes equally long for all wrong ones."""
    digests: Sequence[bytes] = [hashlib.sha256(text.encode()).digest() for text in (given or "", f"Bearer {token}")]
    return hmac.compare_digest(digests[0], digests[1])
