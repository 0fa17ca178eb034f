"""GOT-OCR 2.0: the dialogue that its processor writes, since the checkpoint brings no chat template."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs
from beheld.inputs.media.effective_size import stretched_over_tiles

INPUTS = FamilyInputs(
    placeholders={"image": "<img><imgpad></img>"},
    template="got_ocr2/chat_template.jinja",
    looks={"image": stretched_over_tiles},
)
