"""UDOP: the words of a page follow the question, and its patches follow them.

Shapes: E tokens of the words, P patches of a page's side.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ProcessError, PromptError
from beheld.families.inputs import FamilyInputs

_PATCH, _END = "<pad>", "</s>"


def load(path: Path) -> Any:
    """Load the processor, whose images have two options more; see FamilyInputs.load."""
    from transformers import AutoProcessor
    from transformers.models.layoutlmv3.image_processing_layoutlmv3 import LayoutLMv3ImageProcessorKwargs

    class PageOptions(LayoutLMv3ImageProcessorKwargs, total=False):
        words: list[str]
        boxes: list[list[int]]

    processor = AutoProcessor.from_pretrained(str(path))
    processor.image_processor.valid_kwargs = PageOptions
    config = read_json(path / CONFIG)
    processor.patches_of_side = config.get("image_size", 224) // config.get("patch_size", 16)
    return processor


def read_tokenizer(path: Path) -> Any | None:
    """Make the checkpoint's tokenizer for questions; UDOP's own asks for a place of every word."""
    from transformers import PreTrainedTokenizerFast

    file = path / "tokenizer.json"
    if not file.exists():
        return None
    return PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token=_PATCH, eos_token=_END, unk_token="<unk>")


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Run the processor on one page; see families.inputs.Call.

    Raises:
        ProcessError: there are not as many places as words.
    """
    images, tokenizer = processor.image_processor, processor.tokenizer
    rest = {name: value for name, value in options.items() if name not in ("words", "boxes")}
    words, boxes = options.get("words"), options.get("boxes")
    if words is not None or boxes is not None:
        rest["apply_ocr"] = False
    made = images([item], **{**rest, "return_tensors": "pt"})
    if words is None and boxes is None:
        words, boxes = (list(made[name][0]) if name in made else [] for name in ("words", "boxes"))
    if not isinstance(words, list | tuple) or not isinstance(boxes, list | tuple) or len(words) != len(boxes):
        raise ProcessError(
            "A page's words and boxes are not two lists of one length.",
            'Send {"words": ["Date", ...], "boxes": [[left, top, right, bottom], ...]}, in thousandths of the page.',
        )
    ids, places = [tokenizer.sep_token_id], [tokenizer.sep_token_box]
    if words:
        found = tokenizer(text="?", text_pair=list(words), boxes=[list(box) for box in boxes])
        first = found["input_ids"].index(tokenizer.sep_token_id) + 1
        ids, places = found["input_ids"][first:], found["bbox"][first:]
    bbox_1E4 = torch.tensor([places])
    patches = processor.patches_of_side**2 - covered(bbox_1E4[0], processor.patches_of_side)
    features = {"pixel_values": made["pixel_values"], "bbox": bbox_1E4}
    return features, (*ids, *(tokenizer.pad_token_id,) * patches)


def covered(bbox_E4: Tensor, side: int) -> int:
    """Return how many patches transformers joins to a token; those of a question lie in the first one.

    Its boxes are in thousandths and not, as its formula has it, in parts of the page, so that there are few.
    """
    x_E, y_E = (
        ((bbox_E4[:, axis] + bbox_E4[:, axis + 2]) / 2.0 * side).floor().long().clip(0, side - 1) for axis in (0, 1)
    )
    return len({0, *(x_E + y_E * side).tolist()})


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the page after the question.

    Raises:
        PromptError: there is no page, or no question.
    """
    question = text.replace(_PATCH, " ").strip()
    if not counts.get("image") or not question:
        missing = "question" if counts.get("image") else "page"
        raise PromptError(
            f"UDOP reads a question and a page, and this prompt has no {missing}.",
            'Write {"prompt": "Question answering. What is the date?", "multi_modal_data": {"image": ...}}.',
        )
    return f"{question}{_END}{_PATCH}"


INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    load=load,
    read_tokenizer=read_tokenizer,
    call=call,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    closes="its encoder reads the whole prompt, and the answer starts a new sequence",
    most={"image": 1},
)
