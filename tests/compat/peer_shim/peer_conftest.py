"""What vLLM's server tests import as `tests.conftest`."""

from __future__ import annotations

from peer_plugin import _Pictures as LocalAssetServer

__all__ = ["LocalAssetServer"]
