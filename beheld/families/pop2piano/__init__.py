"""Pop2Piano, which cannot run: it hears beats, and answers in notes."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("pop2piano",),
    refused="its audio is cut at beats, which only the package essentia finds, and its answer is notes of a MIDI file, "
    "which no text holds",
)
