"""Items whose features depend on the prompt's words, because their tower reads both together.

The processed pixels are cached by the content alone; what the tower makes of them, and a prefix, are shared with the
same words only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from beheld.core.errors import PromptError
from beheld.core.media import MediaItem
from beheld.families.inputs import Words
from beheld.inputs.media.digest import Digest, of_array


def joined(
    items: Mapping[str, Sequence[MediaItem]], text: str | None, words: Words, processor: Any
) -> dict[str, list[MediaItem]]:
    """Return the items of a prompt with its words.

    Args:
        items: modality -> its items.
        text: the prompt; None if it was given as token ids.
        words: see FamilyInputs.reads_prompt.
        processor: transformers'.

    Raises:
        PromptError: there is no text, and an item is not given as embeddings.
    """
    if text is None and any("embeds" not in item.features for own in items.values() for item in own):
        raise PromptError(
            "The model's tower reads the prompt's words in a vocabulary of its own, so token ids are not enough.",
            "Give the prompt as text.",
            param="prompt_token_ids",
        )
    found: dict[str, list[MediaItem]] = {}
    for modality, own in items.items():
        added = {} if text is None else words(processor, modality, text)
        found[modality] = [with_words(item, added) for item in own]
    return found


def with_words(item: MediaItem, words: Mapping[str, Any]) -> MediaItem:
    """Return an item with the tensors of words among its features; embeddings, which no tower reads, stay as given."""
    if "embeds" in item.features:
        return item
    key = Digest("item with words").add(item.digest)
    for name in sorted(words):
        key.add(of_array(name, words[name].numpy()))
    return replace(
        item,
        digest=key.done(),
        features={**item.features, **words},
        feature_bytes=item.feature_bytes + sum(each.numel() * each.element_size() for each in words.values()),
    )
