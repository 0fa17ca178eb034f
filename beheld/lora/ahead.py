"""Reads adapters from disk while their requests are prepared, so that the engine does not wait."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import Future

from beheld.core.request import LoRARequest
from beheld.lora.load import Form, LoRAWeights, Stamp, load, stamp


class ReadAhead:
    """Adapters that were read and not yet loaded by the engine. Safe to use from several threads.

    A request may end before it needs its adapter, so an entry is used only while its files are unchanged.

    Args:
        form: what an adapter must fit.
        most: the largest number of adapters kept; the oldest are dropped first.
        held: numbers of adapters that are already loaded and need no reading. A caller that loads one adds its number
            here before it calls `forget`, so at every moment the adapter is in one of the two places and is read once.
    """

    def __init__(self, form: Form, most: int, held: Container[int]) -> None:
        self._form = form
        self._most = most
        self._held = held
        self._lock = threading.Lock()
        self._found: OrderedDict[LoRARequest, tuple[Stamp, Future[LoRAWeights]]] = OrderedDict()

    def read(self, lora: LoRARequest) -> None:
        """Read the adapter, or wait for the thread that reads it; do nothing if it is loaded.

        Raises:
            LoRAError: it cannot be used. The failure is not cached, because the user may repair the folder.
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
        """Return the adapter and keep it until `forget`; read it now if no thread has begun to.

        Raises:
            LoRAError: it cannot be used.
        """
        now = stamp(lora.lora_path)
        with self._lock:
            found = self._current(lora, now)
        return load(lora.lora_name, lora.lora_path, self._form) if found is None else found.result()

    def forget(self, lora_int_id: int) -> None:
        """Drop the entry of this number."""
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
