"""Replaces placeholders by the ids of their items, and records the items' spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from beheld.core.errors import PlaceholderError
from beheld.core.media import MediaItem, MediaSpan


def count_placeholders(token_ids: Sequence[int], placeholder_ids: Mapping[str, int]) -> dict[str, int]:
    """Modality -> number of its placeholders in the ids; modalities without any are left out."""
    counts = {modality: token_ids.count(token) for modality, token in placeholder_ids.items()}
    return {modality: count for modality, count in counts.items() if count}


def check_counts(
    found: Mapping[str, int], given: Mapping[str, int], placeholder: Callable[[str], str], example: Callable[[str], str]
) -> None:
    """Check that each item has exactly one placeholder.

    Args:
        found: modality -> number of placeholders in the prompt.
        given: modality -> number of items.
        placeholder: modality -> the placeholder's text.
        example: modality -> how an item is written in a prompt.

    Raises:
        PlaceholderError: the numbers differ; the message has both, and what to write.
    """
    for modality in sorted(set(found) | set(given)):
        written, items = found.get(modality, 0), given.get(modality, 0)
        if written == items:
            continue
        noun = modality if items == 1 else f"{modality}s" if modality != "audio" else "audio items"
        if items == 0:
            remedy = f'Give one {modality} for each of them under multi_modal_data["{modality}"].'
        else:
            remedy = f"Write {example(modality)!r} once for each {modality}, where it belongs in the text."
        raise PlaceholderError(
            f"The prompt has {written} of the placeholder {placeholder(modality)!r}, but {items} {noun} were given.",
            remedy,
        )


def has_edges(items: Mapping[str, Sequence[MediaItem]]) -> bool:
    """True if some item has ordinary text around it."""
    return any(item.lead or item.tail for own in items.values() for item in own)


def edged_text(text: str, items: Mapping[str, Sequence[MediaItem]], placeholder: Callable[[str], str]) -> str:
    """The prompt's text with every item's text around its placeholder, to be tokenized together.

    Args:
        text: the prompt, with one placeholder per item.
        items: modality -> its items, in order.
        placeholder: modality -> the placeholder's text.
    """
    waiting = {placeholder(modality): iter(own) for modality, own in items.items() if own}

    def edged(match: re.Match[str]) -> str:
        item = next(waiting[match[0]])
        return item.lead + match[0] + item.tail

    return re.sub("|".join(map(re.escape, waiting)), edged, text)


def edged_ids(
    token_ids: Sequence[int],
    items: Mapping[str, Sequence[MediaItem]],
    marks: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """Like `edged_text` for a prompt of token ids: the items' texts are tokenized separately."""
    waiting = {marks[modality]: iter(own) for modality, own in items.items()}
    out: list[int] = []
    for token in token_ids:
        item = next(waiting[token]) if token in waiting else None
        out += (*encode(item.lead), token, *encode(item.tail)) if item is not None else (token,)
    return out


def expand(
    token_ids: Sequence[int], items: Mapping[str, Sequence[MediaItem]], placeholder_ids: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
    """Replace the i-th placeholder of each modality by the ids of its i-th item.

        ids     5  M  7  M  9          M is the placeholder of "image"; items a (3 ids) and b (2 ids)
        out     5  a  a  a  7  b  b  9          spans: a at 1 to 4, b at 5 to 7

    Args:
        token_ids: the prompt, one placeholder per item; `check_counts` has passed.
        items: modality -> its items, in order.
        placeholder_ids: modality -> the placeholder's id (not always that of its embeddings).

    Returns:
        The ids, and the spans in order of place.
    """
    if not items:
        return tuple(token_ids), ()
    modality_by_id = {placeholder_ids[modality]: modality for modality, own in items.items() if own}
    waiting = {modality: iter(own) for modality, own in items.items()}
    out: list[int] = []
    spans: list[MediaSpan] = []
    for token in token_ids:
        modality = modality_by_id.get(token)
        if modality is None:
            out.append(token)
            continue
        item = next(waiting[modality])
        start = len(out)
        out += item.replacement_ids
        spans.append(MediaSpan(item, start, len(out)))
    assert len(spans) == sum(len(own) for own in items.values())
    return tuple(out), tuple(spans)
