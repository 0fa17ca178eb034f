"""The routes of vectors and scores; imports no torch, so that files of requests are checked before it is loaded."""

from __future__ import annotations

from beheld.server.embed_schema import EmbedRequest
from beheld.server.pooling_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

# Paths and the bodies that they read.
POOLING_ROUTES: tuple[tuple[str, type[Pooled]], ...] = (
    ("/v1/embeddings", EmbeddingRequest),
    ("/v2/embed", EmbedRequest),
    ("/pooling", PoolingRequest),
    ("/classify", ClassifyRequest),
    *((path, ScoreRequest) for path in ("/score", "/v1/score")),
    *((path, RerankRequest) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
)
