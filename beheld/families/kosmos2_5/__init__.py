"""Kosmos 2.5: a page, read by learned queries, before a decoder with positions that are added."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("kosmos-2.5",),
    tested=(
        KnownCheckpoint(
            "kosmos-2.5",
            "Kosmos2_5ForConditionalGeneration",
            "microsoft/kosmos-2.5",
            IMAGE,
            "one page, before the prompt (`<ocr>` or `<md>`)",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholder_tokens={"image": "<s>"},
    first_position=lambda config: config.text_config.pad_token_id + 1,
)
