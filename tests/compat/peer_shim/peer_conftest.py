"""What vLLM's server tests import as `tests.conftest`."""

from __future__ import annotations

from peer_plugin import _Pictures as LocalAssetServer
from peer_runners import HfRunner, VllmRunner

__all__ = ["HfRunner", "LocalAssetServer", "VllmRunner"]
