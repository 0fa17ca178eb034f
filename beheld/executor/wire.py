"""The messages between the first rank and the others, and a step's plan in a form that is quickly sent.

Every message is one frame of a pair of sockets that the other rank's process inherits, or, between hosts, of a
connection on which both sides have proved that they know a token. No class but those named here is built from what
arrives.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from beheld.core import config, media, plan, pooling_params, request
from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError
from beheld.core.media import MediaItem
from beheld.core.plan import Admission, EncodeItem, SeqSlice, StepPlan
from beheld.core.request import LoRARequest
from beheld.core.sampling import LogprobsMode, PromptIds, Sampling
from beheld.wire.codec import Codec


@dataclass(frozen=True, eq=False)
class StartRank:
    """Load this rank's part of the model.

    Attributes:
        meeting: where the ranks find each other, see parallel/meeting.py.
        hf_class, hf_config: transformers' configuration: "module:name" of its class, and its JSON.
        shrink: see Executor.start.
    """

    rank: int
    meeting: str
    hf_class: str
    hf_config: str
    info: ModelInfo
    config: EngineConfig
    shrink: bool


@dataclass(frozen=True)
class Joining:
    """This rank is about to connect to the others."""


@dataclass(frozen=True)
class Started:
    """This rank has loaded its part, with this capacity."""

    max_model_len: int
    capacity: Capacity


@dataclass(frozen=True)
class Beat:
    """This rank's process runs.

    Attributes:
        entered, steps: how many collectives and steps it has begun.
        waits_s, device_s: seconds that it has waited in a collective, and for its device; None if it does not.
        works: whether its host computes.
        layers: how many layers its host has begun.
        unbounded: it computes what may take long whatever the step is: a compiler's work, or what a user wrote.
    """

    entered: int
    steps: int
    waits_s: float | None
    device_s: float | None
    works: bool
    layers: int = 0
    unbounded: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """A StepPlan, without what only the first rank needs.

    Attributes:
        slices: (4, S) of each slice the row, start, stop and wanted, int32.
        blocks: (3, N) of each new block the slice's number, the KV group and the block, int32.
        drafts: of slices with drafts: the slice's number, and its token ids.
    """

    id: int
    slices: np.ndarray
    blocks: np.ndarray
    drafts: tuple[tuple[int, tuple[int, ...]], ...]
    admitted: tuple[Admission, ...]
    encode: tuple[EncodeItem, ...]
    released: tuple[int, ...]
    forget: tuple[bytes, ...]


@dataclass(frozen=True)
class StepFailed:
    """A step failed on this rank."""

    id: int
    reason: str


@dataclass(frozen=True)
class Sync:
    """Answer with Synced: all earlier messages are done."""

    number: int


@dataclass(frozen=True)
class Synced:
    """See Sync. `entered` is the number of collectives that this rank has begun."""

    number: int
    entered: int


@dataclass(frozen=True)
class AskMissing:
    """Answer with Missing: which of these are not on the device after all earlier messages."""

    number: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Missing:
    """See AskMissing."""

    number: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class RankItems:
    """Run the towers for these items."""

    items: tuple[MediaItem, ...]


@dataclass(frozen=True)
class AddRankLoRA:
    """Load an adapter; answered by Added."""

    lora: LoRARequest


@dataclass(frozen=True)
class Added:
    """The adapter is loaded, or why it is not."""

    lora_int_id: int
    error: BeheldError | None


@dataclass(frozen=True)
class RemoveLoRA:
    """Remove an adapter."""

    lora_int_id: int


@dataclass(frozen=True)
class PinLoRA:
    """Keep an adapter in memory."""

    lora_int_id: int


@dataclass(frozen=True)
class AskChecksums:
    """Answer with Checksums."""


@dataclass(frozen=True)
class Checksums:
    """The SHA-256 of each of this rank's tensors of weights."""

    digests: Mapping[str, str]


@dataclass(frozen=True)
class RankFailed:
    """This rank cannot go on."""

    error: BeheldError


@dataclass(frozen=True)
class CloseRank:
    """End."""


CODEC = Codec(
    (
        *config.MODEL_CLASSES,
        *(config.EngineConfig, config.Capacity, config.MediaWork),
        *(media.MediaItem, plan.SpanView, plan.Admission, plan.EncodeItem),
        *(Sampling, LogprobsMode, PromptIds, pooling_params.Pooling, pooling_params.Alignment, request.LoRARequest),
        *(StartRank, Joining, Started, Beat, Step, StepFailed, Sync, Synced, AskMissing, Missing, RankItems),
        *(AskChecksums, Checksums, AddRankLoRA, Added, RemoveLoRA, PinLoRA, RankFailed, CloseRank),
    )
)


def packed(step: StepPlan) -> Step:
    """Return a plan as the other ranks need it."""
    rows, starts, stops, blocks, wanted, drafts = zip(*step.slices, strict=True) if step.slices else ((),) * 6
    # Hardly any slice of a decode step has a new block. A comparison takes half of the time of `any`.
    none = ((),) * len(blocks[0]) if blocks else ()
    new = [
        (place, group, block)
        for place, groups in enumerate(blocks)
        if groups != none
        for group, own in enumerate(groups)
        for block in own
    ]
    return Step(
        step.id,
        # Through an array of unsigned integers, which takes half of the time that a signed one or NumPy takes.
        np.frombuffer(array("I", (*rows, *starts, *stops, *wanted)), dtype=np.int32).reshape(4, -1),
        np.array(new, dtype=np.int32).reshape(-1, 3).T,
        tuple((place, ids) for place, ids in enumerate(drafts) if ids) if any(drafts) else (),
        tuple(admission._replace(params=_needed(admission.params)) for admission in step.admitted),
        step.encode,
        step.released,
        step.forget,
    )


def with_features(step: Step, takes: Callable[[EncodeItem], bool]) -> Step:
    """Return the message with features only of the items for which `takes` is true; it still names the others."""
    encode = tuple(item if takes(item) else dataclasses.replace(item, features={}) for item in step.encode)
    return dataclasses.replace(step, encode=encode)


def _needed(given: Sampling | pooling_params.Pooling) -> Sampling | pooling_params.Pooling:
    """Return what a rank that does not sample needs: which logits of the prompt are computed."""
    return given.of_prompt_alone if isinstance(given, Sampling) else given


def unpacked(step: Step, num_groups: int) -> StepPlan:
    """Return the plan of a message."""
    rows, starts, stops, wanted = step.slices.tolist()
    blocks: list[tuple[tuple[int, ...], ...]] = [((),) * num_groups] * len(rows)
    new: dict[int, list[list[int]]] = {}
    for place, group, block in step.blocks.T.tolist():
        new.setdefault(place, [[] for _ in range(num_groups)])[group].append(block)
    for place, groups in new.items():
        blocks[place] = tuple(map(tuple, groups))
    drafts: list[tuple[int, ...]] = [()] * len(rows)
    for place, ids in step.drafts:
        drafts[place] = ids
    # As SeqSlice._make does, without a call of Python for each slice.
    made = map(tuple.__new__, repeat(SeqSlice), zip(rows, starts, stops, blocks, wanted, drafts, strict=True))
    slices = tuple(made)
    return StepPlan(step.id, slices, step.admitted, step.encode, step.released, step.forget)
