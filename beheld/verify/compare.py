"""Compares two traces stage by stage.

For shapes see trace.py.
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
# The tolerance relative to the largest value, for stages that round differently because sums are ordered differently.
_ROUNDING = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# The processor's pixel tensors -> the stage.
_PIXELS = {
    **dict.fromkeys(("pixel_values", "image_patches", "image_pixel_values"), "pixel values"),
    "pixel_values_videos": "pixel values of video",
}
# Kind of media -> the stage that reads its files.
_DECODED = {"video": "decoded video", "audio": "decoded audio"}
# The reference processor's output -> our name of it.
_NAMES = {"image_patches": "pixel_values"}


@dataclass(frozen=True)
class StageVerdict:
    """The verdict on one stage.

    Attributes:
        name: what was compared.
        verdict: SAME, DIFFERENT or NOT_COMPARED.
        detail: the numbers, or why not.
    """

    name: str
    verdict: str
    detail: str = ""


def compare(theirs: Trace, ours: Trace) -> list[StageVerdict]:
    """Compare all stages in the order of a request; the first that differs shows where to look."""
    return [
        *_layout(theirs),
        *_decoded(theirs, ours),
        _text("rendered prompt", theirs.rendered, ours.rendered),
        _prompts(theirs, ours),
        *_features(theirs.features, ours.features),
        *_encoded(theirs.encoded, ours.encoded),
        *_computed(theirs, ours),
    ]


def first_difference(stages: list[StageVerdict]) -> StageVerdict | None:
    """Return the first stage that differs."""
    return next((stage for stage in stages if stage.verdict == DIFFERENT), None)


def _layout(theirs: Trace) -> list[StageVerdict]:
    """Warn that both sides read the checkpoint through our loader, if transformers cannot read it alone."""
    if not theirs.converted:
        return []
    detail = f"beheld converted the checkpoint for transformers ({theirs.converted}): an error there affects both sides"
    return [StageVerdict("layout", NOT_COMPARED, detail)]


def _decoded(theirs: Trace, ours: Trace) -> list[StageVerdict]:
    """Compare what both sides read from media files."""
    return [
        StageVerdict(_DECODED[kind], NOT_COMPARED, theirs.undecoded[kind])
        if kind in theirs.undecoded
        else _contents(_DECODED[kind], theirs.decoded[kind], items)
        for kind, items in ours.decoded.items()
    ]


def _contents(name: str, theirs: list[Tensor], ours: list[Tensor]) -> StageVerdict:
    stages = [
        _floats(name, want.float(), got.float())
        if want.shape == got.shape
        else StageVerdict(name, DIFFERENT, f"{tuple(want.shape)} in transformers, {tuple(got.shape)} in beheld")
        for want, got in zip(theirs, ours, strict=True)
    ]
    place, worst = next(
        ((number, stage) for number, stage in enumerate(stages, 1) if stage.verdict == DIFFERENT), (0, stages[-1])
    )
    return StageVerdict(name, DIFFERENT, f"item {place}: {worst.detail}") if place else worst


def _text(name: str, theirs: str | None, ours: str | None) -> StageVerdict:
    if theirs is None or ours is None:
        return StageVerdict(name, NOT_COMPARED, "the prompt was passed unchanged, or the checkpoint has no template")
    if theirs == ours:
        return StageVerdict(name, SAME, f"{len(theirs)} characters")
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    around = slice(max(0, place - 20), place + 20)
    return StageVerdict(
        name, DIFFERENT, f"from character {place}: {theirs[around]!r} in transformers, {ours[around]!r} in beheld"
    )


def _ids(name: str, theirs: list[int], ours: list[int]) -> StageVerdict:
    if theirs == ours:
        return StageVerdict(name, SAME, f"{len(theirs)}")
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    return StageVerdict(
        name,
        DIFFERENT,
        f"{len(theirs)} in transformers, {len(ours)} in beheld; from token {place}: {theirs[place : place + 6]} in "
        f"transformers, {ours[place : place + 6]} in beheld",
    )


def _prompts(theirs: Trace, ours: Trace) -> StageVerdict:
    stage = _ids("token ids", list(theirs.prompt_ids), list(ours.prompt_ids))
    if stage.verdict == SAME or not ours.media_ids:
        return stage
    text_ids = [[token for token in side.prompt_ids if token not in ours.media_ids] for side in (theirs, ours)]
    if text_ids[0] != text_ids[1]:
        return stage
    return StageVerdict(stage.name, DIFFERENT, f"{stage.detail}; they differ only in the number of media placeholders")


def _computed(theirs: Trace, ours: Trace) -> list[StageVerdict]:
    """Compare the stages that are meaningful only if both sides have the same prompt."""
    if theirs.prompt_ids != ours.prompt_ids:
        names = ("merged embeddings", "positions", "logits", "tokens")
        return [StageVerdict(name, NOT_COMPARED, "the prompts differ") for name in names]
    return [
        _floats("merged embeddings", theirs.embeds_TH, _narrowed(ours.embeds_TH, theirs.embeds_TH)),
        _positions(theirs.positions, ours.positions, shiftable=theirs.shiftable),
        _logits(theirs, ours),
        _ids("tokens", theirs.token_ids, ours.token_ids),
    ]


def _features(theirs: dict[str, list[Tensor]], ours: dict[str, list[Tensor]]) -> list[StageVerdict]:
    if not theirs and not ours:
        return [StageVerdict("pixel values", NOT_COMPARED, "there are no media")]
    return [_feature(name, wants, ours.get(_NAMES.get(name, name))) for name, wants in theirs.items()]


def _feature(name: str, wants: list[Tensor], got: list[Tensor] | None) -> StageVerdict:
    stage = _PIXELS.get(name, f"processor's {name}")
    shapes = _shapes(wants)
    if got is None:
        return StageVerdict(stage, NOT_COMPARED, f"{shapes} in transformers, none in beheld: it belongs to no item")
    parts = _parts(name, wants, got)
    if parts is None:
        return StageVerdict(stage, DIFFERENT, f"{shapes} in transformers, {_shapes(got)} in beheld")
    worst = StageVerdict(stage, SAME, f"{shapes}, equal")
    for number, (part, item) in enumerate(parts, 1):
        if torch.equal(item.to(part.dtype), part):
            continue
        worst = _floats(stage, part.float(), item.float())
        if worst.verdict == DIFFERENT:
            return StageVerdict(stage, DIFFERENT, f"item {number}: {worst.detail}")
    return worst


def _parts(name: str, wants: list[Tensor], got: list[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """Return each item's two tensors; the reference's may be cut from one tensor of the whole prompt."""
    if len(wants) == 1:
        return pairs(name, wants[0], got)
    if len(wants) != len(got):
        return None
    found = [pairs(name, want, [item]) for want, item in zip(wants, got, strict=True)]
    return None if None in found else [pair for parts in found for pair in parts or []]


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)}" for tensor in tensors)


def _encoded(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> list[StageVerdict]:
    """Compare the encoders' outputs, one stage per kind of media; images, or a lone kind, have the plain name."""
    kinds = [kind for kind in MODALITIES if kind in theirs or kind in ours] or ["image"]
    return [
        _floats("encoder output" if kind == kinds[0] else f"encoder output of {kind}", theirs.get(kind), ours.get(kind))
        for kind in kinds
    ]


def _narrowed(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Cut our rows to the reference's width: ours may carry extra columns for later layers after the embedding."""
    if ours is None or theirs is None:
        return ours
    return ours[:, : theirs.shape[1]]


def _floats(name: str, theirs: Tensor | None, ours: Tensor | None) -> StageVerdict:
    if theirs is None or ours is None:
        return StageVerdict(name, NOT_COMPARED, "one side has no such stage")
    ours = ours[..., : theirs.shape[-1]]
    if theirs.shape != ours.shape:
        return StageVerdict(name, DIFFERENT, f"{tuple(theirs.shape)} in transformers, {tuple(ours.shape)} in beheld")
    far, scale = _distance(theirs, ours)
    verdict = SAME if far <= _ROUNDING.get(theirs.dtype, 2e-4) * scale else DIFFERENT
    return StageVerdict(name, verdict, f"{tuple(theirs.shape)}, largest difference {far:.3g} of {scale:.3g}")


def _distance(theirs: Tensor, ours: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest value; infinite if only one side is NaN."""
    a, b = theirs.double(), ours.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf"), 1.0
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    if not a.numel():
        return 0.0, 1.0
    return float((a - b).abs().max()), max(1e-6, float(a.abs().max()))


def _positions(theirs: list[Tensor], ours: list[Tensor], *, shiftable: bool) -> StageVerdict:
    if not theirs:
        return StageVerdict("positions", NOT_COMPARED, "transformers computes them inside the model")
    shift = _shift(theirs, ours) if shiftable else None
    if shift:
        detail = f"beheld's are {shift} less throughout, which does not change relative positions"
        return StageVerdict("positions", SAME, detail)
    for step, (want, got) in enumerate(zip(theirs, ours, strict=False)):
        if want.shape[-1] != got.shape[-1]:
            return StageVerdict("positions", DIFFERENT, f"{want.shape[-1]} in transformers, {got.shape[-1]} in beheld")
        same_axes = got.expand(want.shape) if got.shape[0] == 1 else got
        wide_want = want.expand(same_axes.shape) if want.shape[0] == 1 else want
        if not torch.equal(wide_want, same_axes):
            where = "prompt" if step == 0 else f"answered token {step}"
            return StageVerdict(
                "positions", DIFFERENT, f"{where}: {_end(wide_want)} in transformers, {_end(same_axes)} in beheld"
            )
    return StageVerdict("positions", SAME, f"prompt and {len(theirs) - 1} tokens")


def _shift(theirs: list[Tensor], ours: list[Tensor]) -> int | None:
    """Return the constant by which plain positions differ; None if they differ otherwise."""
    if any(want.shape[0] != 1 or got.shape != want.shape for want, got in zip(theirs, ours, strict=False)):
        return None
    found = {int(d) for want, got in zip(theirs, ours, strict=False) for d in (want - got).flatten().tolist()}
    return found.pop() if len(found) == 1 else None


def _end(positions_XT: Tensor) -> Any:
    return positions_XT[:, -1].tolist()


def _logits(theirs: Trace, ours: Trace) -> StageVerdict:
    worst, most = 0.0, 1e-6
    for step, (want, got) in enumerate(zip(theirs.logits, ours.logits, strict=False)):
        if want.shape != got.shape:
            return StageVerdict("logits", DIFFERENT, f"{want.shape[0]} in transformers, {got.shape[0]} in beheld")
        far, scale = _distance(want, got)
        worst, most = max(worst, far), max(most, scale)
        if far > _ROUNDING[torch.float32] * scale:
            return StageVerdict("logits", DIFFERENT, f"token {step}: largest difference {far:.3g} of {scale:.3g}")
        if theirs.token_ids[step] != ours.token_ids[step]:
            # From here on the two sides compute with different inputs.
            break
    return StageVerdict("logits", SAME, f"largest difference {worst:.3g} of {most:.3g}")
