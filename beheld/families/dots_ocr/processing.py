"""dots.ocr's processor: Qwen2-VL's of images, whose patches have one frame, and a token of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json

IMAGE = "<|imgpad|>"


class DotsOCRProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        self.image_token = IMAGE
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **options: Any) -> str:
        """Return the placeholders of an image: one for each group of merged patches."""
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return IMAGE * (patches // self.image_processor.merge_size**2)


def load(path: Path) -> DotsOCRProcessor:
    """Load the processor of the checkpoint in `path`."""
    tokenizer = AutoTokenizer.from_pretrained(str(path), **own_config(read_json(path / CONFIG)))
    file = path / "chat_template.json"
    template = read_json(file)["chat_template"] if file.is_file() else tokenizer.chat_template
    return DotsOCRProcessor(Qwen2VLImageProcessor.from_pretrained(str(path)), tokenizer, chat_template=template)
