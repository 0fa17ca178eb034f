"""MiniCPM-o: the text of an audio item, what is refused by name, and what is not loaded."""

from __future__ import annotations

import logging

import pytest

from beheld import LLM, SamplingParams
from beheld.core.errors import ModelError
from beheld.families.minicpmo.config import MiniCPMOConfig, num_embeds
from beheld.families.minicpmo.inputs import PLACEHOLDERS
from beheld.families.minicpmo.processing import MiniCPMOProcessor, load
from tests import tiny


@pytest.fixture(scope="module")
def processor() -> MiniCPMOProcessor:
    return load(tiny.checkpoint("minicpmo"), PLACEHOLDERS)


@pytest.mark.parametrize("version", [2.5, 4.5, None])
def test_another_version_is_refused_by_name(version: float | None) -> None:
    with pytest.raises(ModelError, match=f"MiniCPM-o version {version} "):
        MiniCPMOConfig(version=version, vision_config={"hidden_size": 32})


# Samples and embeddings, recorded from audio_feature_extract of processing_minicpmo.py
# (github.com/icyyrain/minicpmo-modified-files), with chunk_input.
@pytest.mark.parametrize(
    ("seconds", "counts"), [(0.61, [15]), (1.3337, [25, 8]), (30.53, [25] * 30 + [13]), (64.2, [25] * 64 + [5])]
)
def test_each_second_of_audio_is_marked(processor: MiniCPMOProcessor, seconds: float, counts: list[int]) -> None:
    outputs, words = processor.audio(tiny.sound(seconds, 1), {})
    assert words == "".join(f"<|audio_start|>{'<unk>' * count}<|audio_end|>" for count in counts)
    assert outputs["audio_features"].shape[-1] == max(outputs["audio_feature_lens"].tolist())
    assert sum(num_embeds(length, 2) for length in outputs["audio_feature_lens"].tolist()) == sum(counts)
    assert outputs["audio_num_windows"].tolist() == [-(-seconds // 30)]


def test_without_chunk_input_an_item_is_marked_once(processor: MiniCPMOProcessor) -> None:
    processor.marked = False
    try:
        assert processor.audio_words(32000) == f"<|audio_start|>{'<unk>' * 50}<|audio_end|>"
    finally:
        processor.marked = True


def test_what_speaks_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("beheld")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "beheld"), LLM(str(tiny.checkpoint("minicpmo")), max_model_len=256) as llm:
            llm.generate(["Hi!"], SamplingParams(max_tokens=1), use_tqdm=False)
    finally:
        logger.removeHandler(caplog.handler)
    assert "1 weights of parts without a use here are left out (tts.)." in caplog.text
    assert "unused" not in caplog.text
