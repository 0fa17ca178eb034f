"""Fun-ASR-Nano: SenseVoice's encoder before Qwen3."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("fun_asr_nano",),
    tested=(
        KnownCheckpoint(
            "fun_asr_nano",
            "FunAsrNanoForConditionalGeneration",
            "FunAudioLLM/Fun-ASR-Nano-2512-hf",
            AUDIO,
            "needs torchaudio for the features that its processor computes",
            by_census=True,
        ),
    ),
    package="torchaudio",
)
