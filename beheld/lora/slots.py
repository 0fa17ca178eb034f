"""The adapters in host memory and in the device's slots, and the rows that use them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from beheld.core.errors import LoRAError
from beheld.core.request import LoRARequest
from beheld.lora.ahead import ReadAhead
from beheld.lora.layers import LoRALinear, Switch
from beheld.lora.load import Form, LoRAWeights
from beheld.lora.step import Runs, Slots, runs_of
from beheld.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(eq=False)
class _Slot:
    """One device slot: its adapter, the rows that use it, and whether to clear it after the last of them."""

    lora: LoRARequest | None = None
    rows: set[int] = field(default_factory=set)
    leaving: bool = False


class LoRASlots:
    """Adapters of one model. The scheduler ensures that at most `max_loras` of them are in use at once.

    Slots are numbered from 1; 0 means no adapter. An unused adapter stays until its place is needed; the least recently
    used goes first.

    Args:
        layers: the layers that can carry adapters.
        form: what an adapter must fit.
        max_loras: slots on the device.
        max_host: adapters in host memory, at least `max_loras`.
        switch: shared with the layers.
    """

    def __init__(
        self, layers: Sequence[LoRALinear], form: Form, *, max_loras: int, max_host: int, switch: Switch
    ) -> None:
        assert 1 <= max_loras <= max_host
        self.switch = switch
        self._layers = layers
        self._max_host = max_host
        self._host: OrderedDict[int, tuple[LoRARequest, LoRAWeights]] = OrderedDict()
        self._ahead = ReadAhead(form, max_host, self._host)
        self._pinned: set[int] = set()
        # In order of last use.
        self._slots: OrderedDict[int, _Slot] = OrderedDict((number, _Slot()) for number in range(1, max_loras + 1))
        self._slot_by_row: dict[int, int] = {}

    # ------------------------------------------------------------------ host memory

    def read(self, request: LoRARequest) -> None:
        """Read an adapter ahead of `add`, unless it is loaded; callable from any thread, concurrently.

        Raises:
            LoRAError: it cannot be used.
        """
        self._ahead.read(_named(request))

    def add(self, request: LoRARequest) -> LoRARequest:
        """Load an adapter into host memory, unless it is there; returns the request with its digest.

        Raises:
            LoRAError: it cannot be used, or its number belongs to another adapter.
        """
        asked = _named(request)
        known = self._host.get(request.lora_int_id)
        if known is not None:
            held = known[0]
            # A folder under another name is the same adapter.
            if held.lora_path != asked.lora_path:
                raise LoRAError(
                    f"lora_int_id {request.lora_int_id} belongs to the adapter {held.lora_name!r} in "
                    f"{held.lora_path!r}, not of {request.lora_name!r} in {request.lora_path!r}.",
                    "Give each adapter a different number, or remove the first.",
                    param="lora_int_id",
                )
            self._host.move_to_end(request.lora_int_id)
            return held
        try:
            # Before reading: otherwise the engine's thread would read an adapter only to refuse it.
            oldest = self._least_needed()
            weights = self._ahead.take(asked)
            held = dataclasses.replace(asked, digest=weights.digest)
            if oldest is not None:
                del self._host[oldest]
            self._host[request.lora_int_id] = held, weights
        finally:
            # Also when there is no room: by the time there is, the files may have changed.
            self._ahead.forget(request.lora_int_id)
        logger.info("Loaded the adapter %r from %s.", held.lora_name, held.lora_path)
        return held

    def _least_needed(self) -> int | None:
        """Return the adapter that a new one replaces; None if there is room."""
        if len(self._host) < self._max_host:
            return None
        oldest = next((number for number in self._host if number not in self._pinned), None)
        if oldest is None:
            raise LoRAError(
                f"All {self._max_host} adapters in memory are pinned.", "Remove one.", or_engine="raise max_cpu_loras"
            )
        return oldest

    def remove(self, lora_int_id: int) -> bool:
        """Remove an adapter; sequences that run with it finish. Returns False if it is not known."""
        known = self._host.pop(lora_int_id, None)
        self._ahead.forget(lora_int_id)
        self._pinned.discard(lora_int_id)
        for number, slot in self._slots.items():
            if slot.lora is not None and slot.lora.lora_int_id == lora_int_id:
                slot.leaving = True
                self._tidy(number)
        return known is not None

    def pin(self, lora_int_id: int) -> bool:
        """Pin an adapter in host memory until it is removed. Returns False if it is not known."""
        if lora_int_id in self._host:
            self._pinned.add(lora_int_id)
        return lora_int_id in self._host

    @property
    def pinned(self) -> frozenset[int]:
        """The numbers of the pinned adapters."""
        return frozenset(self._pinned)

    def known(self) -> tuple[LoRARequest, ...]:
        """Return the adapters in host memory, the least recently used first."""
        return tuple(request for request, _ in self._host.values())

    # ------------------------------------------------------------------ device

    def acquire(self, row: int, lora: LoRARequest | None) -> int:
        """Assign `row` the slot that holds the adapter, filling one if needed; repeated calls change nothing.

        Raises:
            LoRAError: the adapter must be read again, and cannot be or has changed.
        """
        if lora is None:
            self.release(row)
            return 0
        number = next((number for number, slot in self._slots.items() if slot.lora == lora), None)
        if self._slot_by_row.get(row) != number:
            self.release(row)
        if number is None:
            weights = self._weights(lora)
            number = next((number for number, slot in self._slots.items() if not slot.rows), None)
            assert number is not None, "more adapters are in use than there are slots"
            self._write(number, lora, weights)
        self._slots.move_to_end(number)
        self._slots[number].rows.add(row)
        self._slot_by_row[row] = number
        return number

    def release(self, row: int) -> None:
        """Release `row`'s slot."""
        number = self._slot_by_row.pop(row, None)
        if number is not None:
            self._slots[number].rows.discard(row)
            self._tidy(number)

    def _tidy(self, number: int) -> None:
        if self._slots[number].leaving and not self._slots[number].rows:
            self._empty(number)

    def _weights(self, lora: LoRARequest) -> LoRAWeights:
        if lora.lora_int_id not in self._host:
            self.add(lora)
        held, weights = self._host[lora.lora_int_id]
        if held != lora:
            raise LoRAError(
                f"The adapter {lora.lora_name!r} changed while a request waited for it.", "Send the request again."
            )
        self._host.move_to_end(lora.lora_int_id)
        return weights

    def _empty(self, number: int) -> None:
        self._slots[number].lora, self._slots[number].leaving = None, False
        for layer in self._layers:
            layer.empty(number)

    def _write(self, number: int, lora: LoRARequest, weights: LoRAWeights) -> None:
        self._empty(number)
        for layer in self._layers:
            for part, name in enumerate(layer.names):
                if name in weights.matrices:
                    layer.fill(number, part, *weights.matrices[name])
        # Only now: a slot that failed half-way holds no adapter.
        self._slots[number].lora = lora

    # ------------------------------------------------------------------ steps

    def runs(self, slots_T: np.ndarray, device: torch.device) -> Runs | None:
        """Return the LoRA step for tokens with these slots; None if no token has an adapter."""
        return runs_of(slots_T, device)

    def slots(self, slots_T: Tensor) -> Slots:
        """Return the LoRA step for slots that only the device knows."""
        return Slots(slots_T)

    def check(self) -> None:
        """Assert that rows and slots agree."""
        for number, slot in self._slots.items():
            assert slot.rows == {row for row, own in self._slot_by_row.items() if own == number}
            assert slot.lora is not None or not slot.rows, "a row uses an empty slot"
        assert len(self._host) <= self._max_host, "too many adapters in memory"


def _named(request: LoRARequest) -> LoRARequest:
    """Return the request with its folder's resolved path, the same for all names of the folder."""
    folder = request.lora_path
    if folder and "://" not in folder and "\0" not in folder:
        folder = str(Path(folder).expanduser().resolve())
    return dataclasses.replace(request, lora_path=folder, digest=b"")
