"""MOSS-Transcribe-Diarize: Whisper's encoder in windows before Qwen3, with the seconds written between embeddings."""

from __future__ import annotations

from beheld.families.family import AUDIO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("moss_transcribe_diarize",),
    tested=(
        KnownCheckpoint(
            "moss_transcribe_diarize",
            "MossTranscribeDiarizeForConditionalGeneration",
            "hf-audio/MOSS-Transcribe-Diarize-HF",
            AUDIO,
            "transcripts with speakers and times, as the model writes them",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.20", UNDEFINED),
)
