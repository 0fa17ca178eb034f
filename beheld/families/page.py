"""Writes the page docs/models.md from the families' facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from beheld.families.family import TOLERANCE, Family, KnownCheckpoint
from beheld.families.registry import families
from beheld.families.text_types import TEXT_TYPES

T = TypeVar("T")


def tested() -> list[KnownCheckpoint]:
    """Return all checkpoint layouts that are compared with transformers, by name."""
    return sorted((row for family in families().values() for row in family.tested), key=lambda row: row.name)


def refused() -> dict[str, str]:
    """Return why each refused model type is refused."""
    return _by_model_type(lambda family: family.refused or None)


def picking() -> tuple[str, ...]:
    """Return the model types that run as long as their indexer picks all positions."""
    return tuple(_by_model_type(lambda family: family.dense_up_to))


def _by_model_type(read: Callable[[Family], T | None]) -> dict[str, T]:
    found = ((kind, read(family)) for family in families().values() for kind in family.model_types)
    return {kind: value for kind, value in sorted(found, key=lambda each: each[0]) if value is not None}


def checked(row: KnownCheckpoint) -> str:
    """Describe what the comparisons of this layout cover in addition to those of every layout."""
    words = [] if row.whole_prompts or row.by_census else ["cut prompts", "shared prefixes"]
    if "image" in row.modalities:
        words.append("one image" if row.one_image else "several images")
    words += ["videos"] * ("video" in row.modalities)
    words += ["audio"] * ("audio" in row.modalities)
    if {"image", "video"} <= set(row.modalities) and not row.by_census:
        words.append("images with a video" + " (joined)" * row.joined)
    words += ["a GPU"] * row.on_gpu
    if row.tolerance != TOLERANCE and not row.by_census:
        words.append(f"within {row.tolerance:g}")
    return ", ".join(words)


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _line(row: KnownCheckpoint) -> str:
    takes = ", ".join(("text", *row.modalities))
    return f"| {row.name} | {row.architecture} | {row.example} | {takes} | {checked(row)} | {row.note} |"


def markdown() -> str:
    """Return docs/models.md."""
    lines = [
        "# Models",
        "",
        "Written by `beheld models --markdown > docs/models.md`; a test checks that it is current.",
        "",
        "## What runs",
        "",
        "For each of these, a small random checkpoint in the layout of the real one is part of the tests. Its greedy",
        "answers equal those of transformers' `generate` in float32 on a CPU, token by token, and their",
        f"log-probabilities within {TOLERANCE:g}: alone, in a batch of sixteen, with steps that overlap, and after",
        "preemption. The column *also checked* lists what else is compared in the same way: prompts cut into steps,",
        "prefixes shared with another prompt, the media, and the tokens that a GPU gives with graphs and compiled",
        "layers. Where images with a video are *joined*, transformers' `generate` refuses both in one prompt:",
        "it then receives the embeddings that its towers compute for each item. `beheld verify MODEL`",
        "compares a checkpoint of yours stage by stage, of all these families, such prompts too.",
        "",
        "| family | architecture | for example | takes | also checked | remarks |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in tested() if not row.by_census]
    lines += [
        "",
        "## Compared with less",
        "",
        "Tiny checkpoints of these are made of their configuration classes (`python -m tests.census`). Their greedy",
        "answers equal those of transformers' `generate`, and their log-probabilities within 0.001: with prompts cut",
        "into steps, with prompts found in the cache when they are asked again, with so few blocks that sequences",
        "preempt each other, and with the media that the column *also checked* names; not with graphs on a GPU.",
        "",
        "| family | architecture | for example | takes | also checked | remarks |",
        "|---|---|---|---|---|---|",
        *(_line(row) for row in tested() if row.by_census),
        "",
        "In the same way these types of text models are compared:",
        "",
        _listed(TEXT_TYPES) + ".",
        "",
        f"An indexer of {_listed(picking())} picks the positions that a query sees. They run with at most as many",
        "positions as it picks (`index_topk` in config.json): it then picks all, and attention to all is the same. A",
        "larger `max_model_len` is refused.",
        "",
        "Other architectures of transformers with full and sliding attention are run by the same means. At load, a",
        "dry pass checks that every layer calls the paged attention once; their answers have not been compared.",
        "",
        "## Refused models",
        "",
        "| model type | what is missing |",
        "|---|---|",
        *(f"| {name} | {reason} |" for name, reason in refused().items()),
    ]
    return "\n".join(lines) + "\n"
