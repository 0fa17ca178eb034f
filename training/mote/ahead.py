"""Prepares the next step on a stream and a thread of its own while the device still works on the present one."""

import threading
from queue import Queue
from random import Random

import torch

from training.mote.learn import Step, prepare
from training.mote.supply import Supply

# A thread that died leaves the queue empty; better an error than a machine that waits.
_PATIENCE_S = 90


class Ahead:
    """Gives steps, each prepared while the one before ran."""

    def __init__(self, supply: Supply, rng: Random, shards: int, device: torch.device) -> None:
        self._supply, self._rng, self._shards = supply, rng, shards
        self._stream = torch.cuda.Stream(device)
        self._queue: Queue[tuple[Step, torch.cuda.Event]] = Queue(maxsize=2)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with torch.cuda.stream(self._stream):
                step = prepare(self._supply.take(self._rng, self._shards))
                done = self._stream.record_event()
            self._queue.put((step, done))

    def next(self) -> Step:
        """The next step; the present stream waits for its copies, the host does not."""
        step, done = self._queue.get(timeout=_PATIENCE_S)
        stream = torch.cuda.current_stream()
        stream.wait_event(done)
        # Without this the allocator would give the memory away on the side stream while the device still reads it.
        for tensor in step.tensors():
            tensor.record_stream(stream)
        return step
