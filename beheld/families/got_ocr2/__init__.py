"""GOT-OCR 2.0: pages become text, by SAM's tower and a small Qwen2."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("got_ocr2",),
    tested=(
        KnownCheckpoint(
            "got_ocr2",
            "GotOcr2ForConditionalGeneration",
            "stepfun-ai/GOT-OCR-2.0-hf",
            IMAGE,
            "reads pages; images are cut into tiles where crop_to_patches is set",
        ),
    ),
    reference=ReferenceOptions(attention=None, lists_images=True),
)
