"""Compares two traces stage by stage.

Shapes as in trace.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.core.media import MODALITIES
from beheld.verify.layout import pairs
from beheld.verify.trace import Trace

SAME, DIFFERENT, NOT_COMPARED = "same", "different", "not compared"
# By how much values may differ, relative to the largest, after stages that round differently: the order of sums.
_ROUNDING = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# What the processor makes of pixels -> the stage.
_PIXELS = {
    **dict.fromkeys(("pixel_values", "image_patches", "image_pixel_values"), "pixel values"),
    "pixel_values_videos": "pixel values of video",
}
# Kind of media -> the stage of reading its files.
_DECODED = {"video": "decoded video", "audio": "decoded sound"}
# The processor's output there -> its name here.
_NAMES = {"image_patches": "pixel_values"}


@dataclass(frozen=True)
class Stage:
    """One stage's verdict.

    Attributes:
        name: what was compared.
        verdict: SAME, DIFFERENT or NOT_COMPARED.
        detail: the numbers, or why not.
    """

    name: str
    verdict: str
    detail: str = ""


def compare(theirs: Trace, ours: Trace) -> list[Stage]:
    """All stages in the order of a request; the first that differs is where to look."""
    return [
        *_layout(theirs),
        *_decoded(theirs, ours),
        _text("rendered prompt", theirs.rendered, ours.rendered),
        _prompts(theirs, ours),
        *_features(theirs.features, ours.features),
        *_encoded(theirs.encoded, ours.encoded),
        *_computed(theirs, ours),
    ]


def first_difference(stages: list[Stage]) -> Stage | None:
    """The first stage that differs."""
    return next((stage for stage in stages if stage.verdict == DIFFERENT), None)


def _layout(theirs: Trace) -> list[Stage]:
    """That both sides read the checkpoint through the same hands, where transformers could not read it alone."""
    if not theirs.converted:
        return []
    detail = f"transformers' own classes were given {theirs.converted} by beheld: what is wrong there is wrong in both"
    return [Stage("layout", NOT_COMPARED, detail)]


def _decoded(theirs: Trace, ours: Trace) -> list[Stage]:
    """What came out of the files, of kinds that came from files."""
    return [
        Stage(_DECODED[kind], NOT_COMPARED, theirs.undecoded[kind])
        if kind in theirs.undecoded
        else _contents(_DECODED[kind], theirs.decoded[kind], items)
        for kind, items in ours.decoded.items()
    ]


def _contents(name: str, theirs: list[Tensor], ours: list[Tensor]) -> Stage:
    stages = [
        _floats(name, want.float(), got.float())
        if want.shape == got.shape
        else Stage(name, DIFFERENT, f"{tuple(want.shape)} there, {tuple(got.shape)} here")
        for want, got in zip(theirs, ours, strict=True)
    ]
    place, worst = next(
        ((number, stage) for number, stage in enumerate(stages, 1) if stage.verdict == DIFFERENT), (0, stages[-1])
    )
    return Stage(name, DIFFERENT, f"of item {place}: {worst.detail}") if place else worst


def _text(name: str, theirs: str | None, ours: str | None) -> Stage:
    if theirs is None or ours is None:
        return Stage(name, NOT_COMPARED, "the prompt was given as it is, or the checkpoint brings no template")
    if theirs == ours:
        return Stage(name, SAME, f"{len(theirs)} characters")
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    around = slice(max(0, place - 20), place + 20)
    return Stage(name, DIFFERENT, f"from character {place}: {theirs[around]!r} is {ours[around]!r} here")


def _ids(name: str, theirs: list[int], ours: list[int]) -> Stage:
    if theirs == ours:
        return Stage(name, SAME, f"{len(theirs)}")
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    return Stage(
        name,
        DIFFERENT,
        f"{len(theirs)} there, {len(ours)} here; from {place} on: {theirs[place : place + 6]} is "
        f"{ours[place : place + 6]} here",
    )


def _prompts(theirs: Trace, ours: Trace) -> Stage:
    stage = _ids("token ids", list(theirs.prompt_ids), list(ours.prompt_ids))
    if stage.verdict == SAME or not ours.media_ids:
        return stage
    told = [[token for token in side.prompt_ids if token not in ours.media_ids] for side in (theirs, ours)]
    if told[0] != told[1]:
        return stage
    return Stage(stage.name, DIFFERENT, f"{stage.detail}; they differ in the number of places of media alone")


def _computed(theirs: Trace, ours: Trace) -> list[Stage]:
    """The stages that say something only if both sides were asked the same."""
    if theirs.prompt_ids != ours.prompt_ids:
        names = ("merged embeddings", "positions", "logits", "tokens")
        return [Stage(name, NOT_COMPARED, "the prompts differ") for name in names]
    return [
        _floats("merged embeddings", theirs.embeds_TH, _narrowed(ours.embeds_TH, theirs.embeds_TH)),
        _positions(theirs.positions, ours.positions, shiftable=theirs.shiftable),
        _logits(theirs, ours),
        _ids("tokens", theirs.token_ids, ours.token_ids),
    ]


def _features(theirs: dict[str, list[Tensor]], ours: dict[str, list[Tensor]]) -> list[Stage]:
    if not theirs and not ours:
        return [Stage("pixel values", NOT_COMPARED, "there are no media")]
    return [_feature(name, wants, ours.get(_NAMES.get(name, name))) for name, wants in theirs.items()]


def _feature(name: str, wants: list[Tensor], got: list[Tensor] | None) -> Stage:
    stage = _PIXELS.get(name, f"processor's {name}")
    there = _shapes(wants)
    if got is None:
        return Stage(stage, NOT_COMPARED, f"{there} there, none here: it is no part of an item")
    parts = _parts(name, wants, got)
    if parts is None:
        return Stage(stage, DIFFERENT, f"{there} there, {_shapes(got)} here")
    worst = Stage(stage, SAME, f"{there}, equal")
    for number, (part, item) in enumerate(parts, 1):
        if torch.equal(item.to(part.dtype), part):
            continue
        worst = _floats(stage, part.float(), item.float())
        if worst.verdict == DIFFERENT:
            return Stage(stage, DIFFERENT, f"of item {number}: {worst.detail}")
    return worst


def _parts(name: str, wants: list[Tensor], got: list[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """Each item's tensor there and here; there, it may be a part of one of the whole prompt."""
    if len(wants) == 1:
        return pairs(name, wants[0], got)
    if len(wants) != len(got):
        return None
    found = [pairs(name, want, [item]) for want, item in zip(wants, got, strict=True)]
    return None if None in found else [pair for parts in found for pair in parts or []]


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)}" for tensor in tensors)


def _encoded(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> list[Stage]:
    """One stage for each kind of media; that of images, or of a lone kind, has the plain name."""
    kinds = [kind for kind in MODALITIES if kind in theirs or kind in ours] or ["image"]
    return [
        _floats("encoder output" if kind == kinds[0] else f"encoder output of {kind}", theirs.get(kind), ours.get(kind))
        for kind in kinds
    ]


def _narrowed(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Rows may be wider here: what later layers take lies behind the embedding."""
    if ours is None or theirs is None:
        return ours
    return ours[:, : theirs.shape[1]]


def _floats(name: str, theirs: Tensor | None, ours: Tensor | None) -> Stage:
    if theirs is None or ours is None:
        return Stage(name, NOT_COMPARED, "one side has no such stage")
    ours = ours[..., : theirs.shape[-1]]
    if theirs.shape != ours.shape:
        return Stage(name, DIFFERENT, f"{tuple(theirs.shape)} there, {tuple(ours.shape)} here")
    far, scale = _distance(theirs, ours)
    verdict = SAME if far <= _ROUNDING.get(theirs.dtype, 2e-4) * scale else DIFFERENT
    return Stage(name, verdict, f"{tuple(theirs.shape)}, largest difference {far:.3g} of {scale:.3g}")


def _distance(theirs: Tensor, ours: Tensor) -> tuple[float, float]:
    """Largest difference, and largest value; infinite where one side alone is not a number."""
    a, b = theirs.double(), ours.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf"), 1.0
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    if not a.numel():
        return 0.0, 1.0
    return float((a - b).abs().max()), max(1e-6, float(a.abs().max()))


def _positions(theirs: list[Tensor], ours: list[Tensor], *, shiftable: bool) -> Stage:
    if not theirs:
        return Stage("positions", NOT_COMPARED, "transformers counts them inside")
    shift = _shift(theirs, ours) if shiftable else None
    if shift:
        detail = f"here {shift} less throughout, which relative positions do not see"
        return Stage("positions", SAME, detail)
    for step, (want, got) in enumerate(zip(theirs, ours, strict=False)):
        if want.shape[-1] != got.shape[-1]:
            return Stage("positions", DIFFERENT, f"{want.shape[-1]} there, {got.shape[-1]} here")
        same_axes = got.expand(want.shape) if got.shape[0] == 1 else got
        wide_want = want.expand(same_axes.shape) if want.shape[0] == 1 else want
        if not torch.equal(wide_want, same_axes):
            where = "the prompt" if step == 0 else f"answered token {step}"
            return Stage("positions", DIFFERENT, f"of {where}: {_end(wide_want)} there, {_end(same_axes)} here")
    return Stage("positions", SAME, f"of the prompt and {len(theirs) - 1} tokens")


def _shift(theirs: list[Tensor], ours: list[Tensor]) -> int | None:
    """By how much plain positions differ, if everywhere by the same; None otherwise."""
    if any(want.shape[0] != 1 or got.shape != want.shape for want, got in zip(theirs, ours, strict=False)):
        return None
    found = {int(d) for want, got in zip(theirs, ours, strict=False) for d in (want - got).flatten().tolist()}
    return found.pop() if len(found) == 1 else None


def _end(positions_XT: Tensor) -> Any:
    return positions_XT[:, -1].tolist()


def _logits(theirs: Trace, ours: Trace) -> Stage:
    worst, most = 0.0, 1e-6
    for step, (want, got) in enumerate(zip(theirs.logits, ours.logits, strict=False)):
        if want.shape != got.shape:
            return Stage("logits", DIFFERENT, f"{want.shape[0]} there, {got.shape[0]} here")
        far, scale = _distance(want, got)
        worst, most = max(worst, far), max(most, scale)
        if far > _ROUNDING[torch.float32] * scale:
            return Stage("logits", DIFFERENT, f"of token {step}: largest difference {far:.3g} of {scale:.3g}")
        if theirs.token_ids[step] != ours.token_ids[step]:
            # From here on the two sides are asked different things.
            break
    return Stage("logits", SAME, f"largest difference {worst:.3g} of {most:.3g}")
