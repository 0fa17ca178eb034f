"""InstructBLIP: an image or a video before the prompt, and the prompt's words for the queries that read it.

The Q-Former has a tokenizer of its own for these words, which are the prompt as users write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError, PromptTooLongError
from beheld.families.inputs import FamilyInputs, ItemPlace

_MARKS = {"image": "<image>", "video": "<video>"}
_MOST_WORDS = 512


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video, each frame of which has the same number of embeddings.

    Raises:
        ModelError: the checkpoint does not give the number of queries.
    """
    if not processor.num_query_tokens:
        raise ModelError(
            "This InstructBLIP checkpoint does not set num_query_tokens.", "Add it to processor_config.json."
        )
    if modality == "image":
        return processor.image_processor([item], **options), _MARKS["image"] * processor.num_query_tokens
    made = processor.video_processor([item], **options)
    return made, _MARKS["video"] * (processor.num_query_tokens * made["pixel_values"].shape[1])


def rewrite(text: str, counts: Mapping[str, int]) -> tuple[str | ItemPlace, ...]:
    """Put the item first, and the tokenizer's special tokens around the words alone."""
    kinds = tuple(kind for kind in _MARKS if counts.get(kind))
    return (*(ItemPlace(kind) for kind in kinds), _plain(text, kinds))


def _plain(text: str, kinds: tuple[str, ...]) -> str:
    """Return a text without the places of items, which always come first."""
    for kind in kinds:
        text = text.replace(_MARKS[kind], "", 1)
    return text


def variant(folder: Path) -> FamilyInputs:
    """Return the inputs of the checkpoint in a folder, whose config.json tells how many words the Q-Former reads."""
    most = int((read_json(folder / CONFIG).get("qformer_config") or {}).get("max_position_embeddings", _MOST_WORDS))

    def words(processor: Any, modality: str, text: str) -> dict[str, Any]:
        """Return the Q-Former's ids (1, words); see FamilyInputs.reads_prompt.

        Raises:
            PromptTooLongError: it has no positions for so many.
        """
        made = processor.qformer_tokenizer([_plain(text, (modality,))], return_tensors="pt")
        count = made["input_ids"].shape[1]
        if count > most:
            raise PromptTooLongError(
                f"The prompt has {count} tokens for the Q-Former, which reads at most {most} with one {modality}.",
                "Shorten it.",
            )
        return {"qformer_input_ids": made["input_ids"]}

    return replace(INPUTS, reads_prompt=words)


INPUTS = FamilyInputs(
    template="blip2/chat_template.jinja",
    variant=variant,
    call=call,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="each piece",
    most={"image": 1, "video": 1},
)
