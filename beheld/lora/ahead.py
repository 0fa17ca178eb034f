"""Adapters that are read from the disk by whoever prepares a request, while the engine goes on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import Future

from beheld.core.request import LoRARequest
from beheld.lora.load import Form, LoRAWeights, Stamp, load, stamp


class ReadAhead:
    """What was read and is not yet held. Safe to use from several threads.

    It may never be asked for, if the request it was read for ends before: so it counts only as long as its files are
    what they were when they were read.

    Args:
        form: what an adapter must fit.
        most: adapters kept; of more, those read first go.
        held: numbers of adapters that need not be read. Whoever takes one adds its number here, and then calls
            `forget`: at every moment in between it is found in one of the two places, and read once.
    """

    def __init__(self, form: Form, most: int, held: Container[int]) -> None:
        self._form = form
        self._most = most
        self._held = held
        self._lock = threading.Lock()
        self._found: OrderedDict[LoRARequest, tuple[Stamp, Future[LoRAWeights]]] = OrderedDict()

    def read(self, lora: LoRARequest) -> None:
        """Read it, or wait for the thread that is about to have read it; nothing, if it is held.

        Raises:
            LoRAError: it cannot be used. That is not remembered: a folder may be put in order.
        """
        now = stamp(lora.lora_path)
        with self._lock:
            found = self._current(lora, now)
            if found is None and lora.lora_int_id in self._held:
                return
            mine: Future[LoRAWeights] = Future()
            if found is None:
                self._found.pop(lora, None)
                self._found[lora] = now, mine
                while len(self._found) > self._most:
                    self._found.popitem(last=False)
        if found is not None:
            found.result()
            return
        try:
            mine.set_result(load(lora.lora_name, lora.lora_path, self._form))
        except BaseException as error:
            self._drop(lora, mine)
            mine.set_exception(error)
            raise

    def take(self, lora: LoRARequest) -> LoRAWeights:
        """The adapter, here until `forget`; read now if nobody has begun to.

        Raises:
            LoRAError: it cannot be used.
        """
        now = stamp(lora.lora_path)
        with self._lock:
            found = self._current(lora, now)
        return load(lora.lora_name, lora.lora_path, self._form) if found is None else found.result()

    def forget(self, lora_int_id: int) -> None:
        """Drop what was read for this number."""
        with self._lock:
            for lora in [lora for lora in self._found if lora.lora_int_id == lora_int_id]:
                del self._found[lora]

    def _current(self, lora: LoRARequest, now: Stamp) -> Future[LoRAWeights] | None:
        then, found = self._found.get(lora, (now, None))
        return found if then == now else None

    def _drop(self, lora: LoRARequest, mine: Future[LoRAWeights]) -> None:
        with self._lock:
            _, found = self._found.get(lora, (None, None))
            if found is mine:
                del self._found[lora]
