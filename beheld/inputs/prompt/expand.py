"""Expands placeholders to their items' ids, and records the spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from beheld.core.errors import PlaceholderError
from beheld.core.media import MediaItem, MediaSpan


def find_places(token_ids: Sequence[int], places: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int, int]]:
    """Return (modality, start, stop) of every place of an item, in the order of the ids.

    Args:
        token_ids: the prompt.
        places: modality -> the ids, in a row, that an item replaces.
    """
    ids = token_ids if isinstance(token_ids, list | tuple) else list(token_ids)
    found: list[tuple[str, int, int]] = []
    for modality, place in places.items():
        start = 0
        for _ in range(ids.count(place[0])):
            # A place does not repeat its first id, so none lies between one place's first id and its last.
            start = ids.index(place[0], start)
            stop = start + len(place)
            if tuple(ids[start:stop]) == place:
                found.append((modality, start, stop))
            start += 1
    return sorted(found, key=itemgetter(1))


def count_placeholders(token_ids: Sequence[int], places: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Count the places of items in the ids, by modality; modalities without any are left out."""
    found: dict[str, int] = {}
    for modality, _, _ in find_places(token_ids, places):
        found[modality] = found.get(modality, 0) + 1
    return found


def check_counts(
    found: Mapping[str, int], given: Mapping[str, int], placeholder: Callable[[str], str], example: Callable[[str], str]
) -> None:
    """Check that each item has exactly one placeholder.

    Args:
        found: modality -> number of placeholders in the prompt.
        given: modality -> number of items.
        placeholder: modality -> the placeholder's text.
        example: modality -> an item's text in a prompt.

    Raises:
        PlaceholderError: the numbers differ; the message has both, and what to write.
    """
    for modality in sorted(set(found) | set(given)):
        written, items = found.get(modality, 0), given.get(modality, 0)
        if written == items:
            continue
        noun = modality if items == 1 else f"{modality}s" if modality != "audio" else "audio items"
        verb = "was" if items == 1 else "were"
        if items == 0:
            remedy = f'Give one {modality} for each of them under multi_modal_data["{modality}"].'
        else:
            remedy = f"Write {example(modality)!r} once for each {modality}, where it belongs in the text."
        raise PlaceholderError(
            f"The prompt has {written} of the placeholder {placeholder(modality)!r}, but {items} {noun} {verb} given.",
            remedy,
        )


def has_edges(items: Mapping[str, Sequence[MediaItem]]) -> bool:
    """Return whether an item comes with ordinary text around it."""
    return any(item.lead or item.tail for own in items.values() for item in own)


def edged_text(text: str, items: Mapping[str, Sequence[MediaItem]], placeholder: Callable[[str], str]) -> str:
    """Return the prompt's text with every item's text around its placeholder, to be encoded as one.

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
    places: Mapping[str, tuple[int, ...]],
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """Insert items' texts into a prompt of ids, which has no text to encode them with."""
    waiting = {modality: iter(own) for modality, own in items.items() if own}
    out: list[int] = []
    last = 0
    for modality, start, stop in find_places(token_ids, {modality: places[modality] for modality in waiting}):
        item = next(waiting[modality])
        out += (*token_ids[last:start], *encode(item.lead), *token_ids[start:stop], *encode(item.tail))
        last = stop
    return [*out, *token_ids[last:]]


def expand(
    token_ids: Sequence[int], items: Mapping[str, Sequence[MediaItem]], places: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
    """Replace the i-th place of each modality by the ids of its i-th item.

        ids     5  M  7  M  9          M is the place of "image"; items a (3 ids) and b (2 ids)
        out     5  a  a  a  7  b  b  9          spans: a at 1 to 4, b at 5 to 7

    Args:
        token_ids: the prompt, one place per item; `check_counts` has passed.
        items: modality -> its items, in order.
        places: modality -> the ids, in a row, that an item replaces (not always those of its embeddings).

    Returns:
        The ids, and the spans in prompt order.
    """
    if not items:
        return tuple(token_ids), ()
    waiting = {modality: iter(own) for modality, own in items.items() if own}
    out: list[int] = []
    spans: list[MediaSpan] = []
    last = 0
    for modality, start, stop in find_places(token_ids, {modality: places[modality] for modality in waiting}):
        item = next(waiting[modality])
        out += token_ids[last:start]
        spans.append(MediaSpan(item, len(out), len(out) + len(item.replacement_ids)))
        out += item.replacement_ids
        last = stop
    out += token_ids[last:]
    assert len(spans) == sum(len(own) for own in items.values())
    return tuple(out), tuple(spans)
