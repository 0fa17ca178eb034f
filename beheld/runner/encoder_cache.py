"""Runs towers, keeps embeddings by digest, and merges them into the step's input embeddings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from beheld.core.errors import EngineDeadError, StepError
from beheld.core.media import ENCODED
from beheld.core.plan import EncodeItem, SpanView
from beheld.models.adapter import ModelAdapter
from beheld.parallel.shared_items import SharedItems
from beheld.platform.platform import Event
from beheld.platform.registry import platform_of
from beheld.runner.faults import let_go

# Bounds one tower call, so that its activations stay small compared with the weights.
_CALL_EMBEDS = 4096
# On a CPU a larger call gains nothing: its products are long enough, and their data no longer fits the caches. Eight
# images of 980 x 980 in one call also cost 66 ms for copying them together.
_CALL_BYTES = 4 << 20
_REASONS = 1024


class EncoderCache:
    """Embeddings on the device, by digest. What to encode and what to drop is the scheduler's decision.

    Args:
        shared: gives all ranks the embeddings of items that they share out; None if each encodes all items.
    """

    def __init__(self, adapter: ModelAdapter, shared: SharedItems | None = None) -> None:
        self._adapter = adapter
        self._shared = shared
        self._platform = platform_of(adapter.device)
        self._call_bytes = _CALL_BYTES if self._platform.synchronous else None
        self._embeds: dict[bytes, Tensor] = {}
        # Why the most recent towers failed. A sequence that needs one of these fails in this step or the next; the
        # scheduler never asks to forget items that it has marked as lost.
        self._failures: dict[bytes, str] = {}
        self._marks: deque[tuple[Event, Event]] = deque()

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drop embeddings."""
        for digest in digests:
            self._embeds.pop(digest, None)
            self._failures.pop(digest, None)

    def encode(self, items: Sequence[EncodeItem]) -> tuple[bytes, ...]:
        """Run the towers for `items` and keep their embeddings; returns the digests of those that failed.

        A failing item does not affect others: after a failed call each item is tried alone to find it, and the others
        are run in the calls that they would have had without it. The sequences that need a failed item fail in `taken`,
        with the tower's reason.
        """
        waiting = [item for item in items if item.digest not in self._embeds]
        if not waiting:
            return ()
        begin = self._mark()
        for item in waiting:
            if ENCODED in item.features:
                self._run([item])
        left = [item for item in waiting if ENCODED not in item.features]
        if self._shared is None:
            self._run(left)
        elif left:
            self._run_own(left, self._shared.owners(items), self._shared)
        for digest in list(self._failures)[:-_REASONS]:
            del self._failures[digest]
        self._marks.append((begin, self._mark()))
        return tuple(item.digest for item in waiting if item.digest not in self._embeds)

    def _run(self, items: list[EncodeItem]) -> None:
        """Run the towers for `items`, in calls that do not depend on which of them fail.

        A matrix product of another number of rows may round differently, in float32 too. So an item that ran alone may
        change greedy answers.
        """
        alone: set[bytes] = set()
        while items:
            batch = next(_batches(items, self._call_bytes))
            if self._try(batch) is not None:
                culprits = {item.digest for item in batch if item.digest not in alone and not self._runs_alone(item)}
                alone |= {item.digest for item in batch}
                if culprits:
                    items = [item for item in items if item.digest not in culprits]
                    continue
                # Each runs alone: together they were too much for one call.
            items = items[len(batch) :]

    def _run_own(self, items: list[EncodeItem], owners: Mapping[bytes, int], shared: SharedItems) -> None:
        """Run the towers for this rank's share of `items`, and keep the embeddings of all of them, as all ranks do."""
        own = [item for item in items if shared.owns(owners[item.digest])]
        self._run(own)
        made = {item.digest: self._embeds.get(item.digest) for item in own}
        found = {digest: self._failures[digest] if embeds is None else embeds for digest, embeds in made.items()}
        for digest, each in shared.exchanged(items, owners, found).items():
            if isinstance(each, str):
                self._failures[digest] = each
            else:
                self._embeds[digest] = each
                self._failures.pop(digest, None)

    def _runs_alone(self, item: EncodeItem) -> bool:
        """Encode an item alone; False, with the reason noted, if its tower fails."""
        reason = self._try([item])
        if reason is not None:
            self._failures.pop(item.digest, None)
            self._failures[item.digest] = f"the {item.modality} tower failed: {reason}"
        return reason is None

    def _mark(self) -> Event:
        event = self._platform.event(timing=True)
        event.record()
        return event

    def spent_s(self) -> float:
        """Seconds of towers that have ended since the last call; does not wait for any."""
        spent = 0.0
        while self._marks:
            begin, end = self._marks[0]
            if not end.query():
                break
            spent += begin.elapsed_time(end) / 1e3
            self._marks.popleft()
        return spent

    def _try(self, items: Sequence[EncodeItem]) -> str | None:
        """Encode `items` in one call; None, or why it failed, with all memory of the call given back."""
        try:
            self._keep(items, self._embeds_of(items))
        except EngineDeadError:
            raise
        except Exception as error:
            let_go(error, self._adapter.device)
            return str(error)
        return None

    def _embeds_of(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        if ENCODED not in items[0].features:
            return self._adapter.encode(items)
        return [item.features[ENCODED].to(self._adapter.device, copy=True) for item in items]

    def _keep(self, items: Sequence[EncodeItem], embeds: Sequence[Tensor]) -> None:
        for item, embeds_EH in zip(items, embeds, strict=True):
            if embeds_EH.shape[0] != item.num_embeds:
                raise StepError(
                    f"The {item.modality} gave {embeds_EH.shape[0]} embeddings for {item.num_embeds} places."
                )
            self._embeds[item.digest] = embeds_EH
            self._failures.pop(item.digest, None)

    def merge(self, embeds_TH: Tensor, first_token: int, start: int, stop: int, spans: Sequence[SpanView]) -> None:
        """Overwrite, in place, the rows of positions `start` to `stop` that take an embedding.

        A row may be wider than an embedding; its other columns stay as the token's own.
        `first_token` is the index of position `start` in the step:

            step    ... | first_token ......................... |
            span          start of slice .. span.start .. span.stop .. stop of slice
        """
        for place, source_EH in self.taken(start, stop, spans):
            if isinstance(place, range):
                rows: slice | Tensor = slice(place.start + first_token, place.stop + first_token)
            else:
                rows = torch.from_numpy(place + first_token).to(embeds_TH.device)
            embeds_TH[rows, : source_EH.shape[1]] = source_EH

    def taken(self, start: int, stop: int, spans: Sequence[SpanView]) -> Iterator[tuple[range | np.ndarray, Tensor]]:
        """For each span with embeddings for positions `start` to `stop`: which of these, counted from `start`, and the
        embeddings (E, H).

        Raises:
            StepError: they are not on the device; the message says why.
        """
        for span in spans:
            low, high = max(start, span.start), min(stop, span.stop)
            if low >= high:
                continue
            if span.embed_mask is None:
                source = self._source(span)
                whole = high - low == len(source)
                yield (
                    range(low - start, high - start),
                    source if whole else source[low - span.start : high - span.start],
                )
                continue
            mask = np.array(span.embed_mask)
            before, inside = int(mask[: low - span.start].sum()), mask[low - span.start : high - span.start]
            count = int(inside.sum())
            if count:
                yield np.flatnonzero(inside) + (low - start), self._source(span)[before : before + count]

    def states(self, span: SpanView) -> Tensor:
        """Keys and values of an item's states, (E, L, 2, K, C).

        Raises:
            StepError: they are not on the device; the message says why.
        """
        return self._source(span)

    def _source(self, span: SpanView) -> Tensor:
        """The embeddings of a span that takes some; for other spans none are encoded."""
        source = self._embeds.get(span.digest)
        if source is None:
            reason = self._failures.get(span.digest, f"the embeddings of a {span.modality} are missing")
            raise StepError(reason, "Send another one, or leave out options that change its size.")
        return source

    def known(self, digest: bytes) -> Tensor | None:
        """The embeddings kept under a digest."""
        return self._embeds.get(digest)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._embeds

    def __len__(self) -> int:
        return len(self._embeds)


def _batches(items: list[EncodeItem], max_bytes: int | None) -> Iterator[list[EncodeItem]]:
    """Items that share a tower call: as many as the bounds on embeddings and bytes of features allow, at least one."""
    batch: list[EncodeItem] = []
    total, num_bytes = 0, 0
    for item in items:
        own = sum(value.nbytes for value in item.features.values() if isinstance(value, Tensor))
        full = total + item.num_embeds > _CALL_EMBEDS or (max_bytes is not None and num_bytes + own > max_bytes)
        if batch and full:
            yield batch
            batch, total, num_bytes = [], 0, 0
        batch.append(item)
        total += item.num_embeds
        num_bytes += own
    if batch:
        yield batch
