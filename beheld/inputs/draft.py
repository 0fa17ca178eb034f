"""A request on its way through the pipeline: read, then with its items, then sealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from beheld.core.media import MediaItem, MediaReceipt
from beheld.core.params import SamplingParams, Thoughts
from beheld.core.request import LoRARequest
from beheld.inputs.prompt.parse import ParsedPrompt
from beheld.utils.cancellation import Departure

ItemsByModality = Mapping[str, Sequence[MediaItem]]


@dataclass(frozen=True)
class Order:
    """What is said of a request beside its prompt and its sampling parameters; see Request.

    Attributes:
        departure: of whoever asked; what is made for them ends with it, as far as it can be ended.
    """

    request_id: str
    lora: LoRARequest | None = None
    priority: int = 0
    arrival: float = 0.0
    seed: int = 0
    departure: Departure = field(default_factory=Departure, compare=False)


@dataclass(frozen=True, eq=False)
class Draft:
    """A request whose media are not opened yet.

    Attributes:
        ids: its token ids, with one marker per item.
        parsed: its text, media, options and salt.
        encode: its ids once the items' own text stands around their markers.
        params: as the user gave them.
        order: the rest.
        thoughts: that may stand before what follows a grammar.
    """

    ids: Sequence[int]
    parsed: ParsedPrompt
    encode: Callable[[ItemsByModality], list[int]]
    params: SamplingParams
    order: Order
    thoughts: Thoughts | None = None


@dataclass(frozen=True, eq=False)
class Made:
    """A request with its items by modality, and their receipts in the order of the prompt."""

    draft: Draft
    ids: Sequence[int]
    items: ItemsByModality
    receipts: tuple[MediaReceipt, ...]
