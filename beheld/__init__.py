"""beheld: an engine for vision-, video- and audio-language models.

Names are imported when first used, so that `import beheld` costs nothing and `beheld --help` loads no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from beheld.utils.gc_tuning import paused_collector
from beheld.utils.roomy_stack import roomy
from beheld.utils.version import VERSION

if TYPE_CHECKING:
    from beheld.api.async_llm import AsyncLLM
    from beheld.api.llm import LLM
    from beheld.core.config import EngineArgs
    from beheld.core.errors import BeheldError, EngineError, UserError
    from beheld.core.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from beheld.core.params import SamplingParams
    from beheld.core.pooling_params import PoolingParams
    from beheld.core.request import LoRARequest
    from beheld.core.speech import SpeechOrder

__version__ = VERSION

_HOMES = {
    "LLM": "beheld.api.llm",
    "AsyncLLM": "beheld.api.async_llm",
    "EngineArgs": "beheld.core.config",
    "SamplingParams": "beheld.core.params",
    "PoolingParams": "beheld.core.pooling_params",
    "LoRARequest": "beheld.core.request",
    "SpeechOrder": "beheld.core.speech",
    "RequestOutput": "beheld.core.outputs",
    "PoolingRequestOutput": "beheld.core.outputs",
    "EmbeddingRequestOutput": "beheld.core.outputs",
    "ClassificationRequestOutput": "beheld.core.outputs",
    "ScoringRequestOutput": "beheld.core.outputs",
    "CompletionOutput": "beheld.core.outputs",
    "BeheldError": "beheld.core.errors",
    "UserError": "beheld.core.errors",
    "EngineError": "beheld.core.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeheldError",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineError",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "SpeechOrder",
    "UserError",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'beheld' has no attribute {name!r}")
    if home not in sys.modules:
        # The collector would walk the objects of torch again and again while it is imported.
        with paused_collector():
            roomy(importlib.import_module)(home)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
