"""Intern-S1: transformers' InternVL around Qwen3, and a tokenizer with further vocabularies for formulas."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("interns1",),
    architectures=("InternS1ForConditionalGeneration",),
    tested=(
        KnownCheckpoint(
            "interns1",
            "InternS1ForConditionalGeneration",
            "internlm/Intern-S1-mini",
            IMAGE_AND_VIDEO,
            "tiles; a prompt that its tokenizer would read as a formula (SMILES, IUPAC) or a protein is refused; its "
            "tokenizer needs the package sentencepiece",
        ),
    ),
    definition=Definition(config="config:InternS1Config", model="modeling:InternS1ForConditionalGeneration"),
    videos_as_images=True,
    calls=("internlm", "hermes"),
    reasoning=("think",),
)
