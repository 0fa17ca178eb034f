"""Qwen3-ASR in its publisher's own layout, of which transformers' class would read nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld import LLM
from beheld.core.errors import ModelError
from tests.tiny_text import write_json

ALIGNER = {
    "architectures": ["Qwen3ASRForConditionalGeneration"],
    "model_type": "qwen3_asr",
    "thinker_config": {"classify_num": 5000, "model_type": "qwen3_forced_aligner"},
    "timestamp_segment_time": 80,
    "timestamp_token_id": 151705,
}


def test_the_publishers_layout_is_refused(tmp_path: Path) -> None:
    """It was taken for a model of the default sizes, whose weights were missing."""
    write_json(tmp_path / "config.json", ALIGNER)
    for options in ({}, {"runner": "pooling"}):
        with pytest.raises(ModelError, match=r"has thinker_config.*Qwen3-ASR-1\.7B-hf"):
            LLM(str(tmp_path), **options)
