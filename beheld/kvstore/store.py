"""Reads and writes the folder's files in threads, so that no step waits for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from beheld.core.kv_transfer import KVTransferConfig
from beheld.core.request import Request
from beheld.kvstore.folder import BlockFolder, BrokenBlockError
from beheld.utils.log import get_logger, once

logger = get_logger(__name__)

_READERS = 4
# Of the host's memory, and in bytes: what may be read ahead, and as much again may wait to be written.
_SHARE, _MOST = 0.125, 4 << 30
# Seconds that an engine that ends gives to what is left to write.
_FLUSH_S = 30.0
# A reading that takes longer is late, and while all threads are late nothing more is read.
_LATE_S = 10.0


@dataclass(eq=False)
class FileReading:
    """What is read of files; see BlockReading.

    Attributes:
        reserved: bytes of room that it has.
        begun_s: when a thread began with it, on the monotonic clock; None before.
    """

    reserved: int
    blocks: list[np.ndarray] = field(default_factory=list)
    broken: str = ""
    ended: bool = False
    forgotten: bool = False
    begun_s: float | None = None


class FileStore:
    """See PrefixStore; of one BlockFolder.

    Args:
        config: says which of reading and writing this engine does.
        kind_of: finds out the folder's `kind` again, once the weights were read again.
        room: bytes that may be read ahead, and that may wait to be written; None for a share of the host's memory.
    """

    def __init__(
        self, folder: BlockFolder, config: KVTransferConfig, kind_of: Callable[[], str], room: int | None = None
    ) -> None:
        self.folder = folder
        self._config = config
        self._kind_of = kind_of
        self.reads = config.is_kv_consumer
        self.writes = config.is_kv_producer
        self.fails = config.kv_load_failure_policy == "fail"
        self._room = _room() if room is None else room
        self._read_bytes = 0
        self._write_bytes = 0
        self._news = threading.Condition()
        self._running: set[FileReading] = set()
        self._readers = ThreadPoolExecutor(_READERS, "kv-read")
        # One, so that blocks are written in the order of the prompt, and removed after they were written.
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._writing: set[Future[None]] = set()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, request: Request, first: int, keys: Sequence[bytes]) -> Any:
        """See PrefixStore. A prompt that is larger than all of the room is read as far as that goes."""
        if not keys or not self.reads or self._is_stuck():
            return FileReading(0, ended=True, forgotten=True)
        size = self.folder.block_bytes
        keys = keys[: max(1, self._room // size)]
        reading = FileReading(len(keys) * size)
        with self._news:
            if self._read_bytes and self._read_bytes + reading.reserved > self._room:
                return None
            self._read_bytes += reading.reserved
        self._readers.submit(self._read, reading, tuple(keys), self.folder)
        return reading

    def _read(self, reading: FileReading, keys: Sequence[bytes], folder: BlockFolder) -> None:
        reading.begun_s = time.monotonic()
        with self._news:
            self._running.add(reading)
        broken = ""
        try:
            for key in keys:
                if reading.forgotten:
                    break
                block = folder.read(key)
                if block is None:
                    break
                reading.blocks.append(block)
        except BrokenBlockError as error:
            broken = str(error)
            logger.warning("A block of a prompt is computed instead of read: %s.", broken)
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
            logger.exception("A block of a prompt is computed instead of read.")
        with self._news:
            self._running.discard(reading)
            reading.broken = broken
            reading.ended = True
            if not reading.forgotten:
                used = len(reading.blocks) * folder.block_bytes
                self._read_bytes -= reading.reserved - used
                reading.reserved = used
            self._news.notify_all()

    def _is_stuck(self) -> bool:
        """True while every thread waits for files that do not come."""
        now = time.monotonic()
        late = [r for r in self._running if r.begun_s is not None and now - r.begun_s > _LATE_S]
        return len(late) == _READERS

    def forget(self, reading: FileReading) -> None:
        """See PrefixStore."""
        with self._news:
            if not reading.forgotten:
                reading.forgotten = True
                self._read_bytes -= reading.reserved

    def wait(self, seconds: float) -> None:
        """See PrefixStore."""
        with self._news:
            self._news.wait(seconds)

    # ---- writing -----------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """See PrefixStore."""
        return self._write_bytes < self._room

    def keep(self, keys: Sequence[bytes], parts: Sequence[np.ndarray]) -> None:
        """See PrefixStore."""
        if self.writes:
            with self._news:
                self._write_bytes += len(keys) * self.folder.block_bytes
            self._submit(self._write, tuple(keys), tuple(parts), self.folder)

    def _write(self, keys: Sequence[bytes], parts: Sequence[np.ndarray], folder: BlockFolder) -> None:
        try:
            for index, key in enumerate(keys):
                if not folder.holds(key):
                    folder.write(key, np.concatenate([part[index] for part in parts]))
        except OSError as error:
            # Answers do not depend on it.
            once(logger, logging.WARNING, f"Keys and values are not kept in {folder.root}: {error}.")
        finally:
            with self._news:
                self._write_bytes -= len(keys) * folder.block_bytes

    def drop(self, keys: Sequence[bytes]) -> None:
        """See PrefixStore."""
        self._submit(self.folder.remove, tuple(keys))

    def _submit(self, work: Callable[..., None], *given: Any) -> None:
        future = self._writer.submit(work, *given)
        self._writing.add(future)
        future.add_done_callback(self._writing.discard)

    def flush(self, seconds: float = _FLUSH_S) -> None:
        """Return when all is written that was to be kept, after so many seconds at most."""
        left = wait(list(self._writing), seconds).not_done
        if left:
            logger.warning("The engine ends before all keys and values of its prompts are kept.")

    def close(self) -> None:
        """Write what is left, and end the threads."""
        self.flush()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)

    # ---- other weights -----------------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """The weights are worthless: nothing is read or written until `renew`."""
        self.reads = self.writes = False

    def renew(self) -> None:
        """The weights were read again, and may be others."""
        self.folder = self.folder.of_kind(self._kind_of())
        self.reads, self.writes = self._config.is_kv_consumer, self._config.is_kv_producer


def _room() -> int:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_MOST, int(_SHARE * host))
