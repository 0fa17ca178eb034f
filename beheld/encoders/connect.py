"""Connects an engine's input pipeline to encoders elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import ConfigError
from beheld.encoders.client import RemoteEncoders
from beheld.encoders.messages import model_of
from beheld.utils import env


def encodes_apart(info: ModelInfo) -> bool:
    """Return whether media enter the text as embeddings that the towers alone make."""
    return bool(info.modalities) and info.cross is None and not info.encoder_reads and not info.is_encoder_decoder


def token() -> str:
    """Return the secret that encoders and their clients share.

    Raises:
        ConfigError: there is none.
    """
    found = env.ENCODER_TOKEN()
    if not found:
        raise ConfigError(
            "Encoders and their clients need a shared secret.",
            "Set BEHELD_ENCODER_TOKEN to the same 16 or more characters for all, as `openssl rand -hex 16` prints.",
            param="encoder_urls",
        )
    return found


def connected(urls: Sequence[str], info: ModelInfo, config: EngineConfig) -> RemoteEncoders | None:
    """Return the encoders at these addresses; None if there are none.

    Raises:
        ConfigError: there is no secret, an encoder refuses it or has other weights, or the model's media do not enter
            the text as embeddings.
    """
    if not urls:
        return None
    if not encodes_apart(info):
        raise ConfigError(
            f"{info.name!r} ({info.architecture}) has no towers whose embeddings enter the text.",
            "Leave encoder_urls out.",
            param="encoder_urls",
        )
    return RemoteEncoders(urls, token(), model_of(info, config), config.dtype)
