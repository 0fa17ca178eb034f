"""What vLLM's server tests import as `tests.models.utils`."""

from __future__ import annotations

from peer_runners import EmbedModelInfo, check_embeddings_close, matryoshka_fy, softmax

__all__ = ["EmbedModelInfo", "check_embeddings_close", "matryoshka_fy", "softmax"]
