"""PP-Chart2Table: GOT-OCR's class reads a chart as a table."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("pp_chart2table",),
    tested=(
        KnownCheckpoint(
            "pp_chart2table",
            "GotOcr2ForConditionalGeneration",
            "PaddlePaddle/PP-Chart2Table_safetensors",
            IMAGE,
            "a chart in one view",
            by_census=True,
        ),
    ),
)
