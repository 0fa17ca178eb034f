"""Keeps a pool of shards on the device, renewed by processes that render without pause.

Rendering is slower than training, so a shard is learned from about twice; the pool is large, so that happens minutes
apart. Workers write files into a folder in memory; a thread moves them to the device and drops the oldest.
"""

import os
import pickle
import shutil
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from training.mote.checkpoint import build_tokenizer, read_words
from training.mote.dialogue import Dialogue
from training.mote.shard import Shard, make_shard

_WAITING = 48


@dataclass(frozen=True)
class Loaded:
    """A shard whose patches lie on the device."""

    picture_patches: Tensor
    picture_grids: np.ndarray
    clip_patches: Tensor
    clip_grids: np.ndarray
    dialogues: tuple[Dialogue, ...]


def load(shard: Shard, device: torch.device) -> Loaded:
    """Copy the patches of a shard to the device."""
    return Loaded(
        torch.from_numpy(shard.picture_patches).to(device),
        shard.picture_grids,
        torch.from_numpy(shard.clip_patches).to(device),
        shard.clip_grids,
        shard.dialogues,
    )


def _render_forever(folder: Path, seed: int, stride: int) -> None:
    os.nice(10)
    tokenizer = build_tokenizer(read_words())
    while folder.is_dir():
        if len(os.listdir(folder)) > _WAITING:
            time.sleep(0.05)
            continue
        shard = make_shard(tokenizer, seed)
        try:
            draft = folder / f"{seed}.part"
            with draft.open("wb") as file:
                pickle.dump(shard, file, protocol=5)
            draft.rename(folder / f"{seed}.shard")
        except FileNotFoundError:
            return
        seed += stride


class Supply:
    """A pool of shards: `take` gives some, fresh ones first. Start it before the device is touched: it forks."""

    def __init__(self, workers: int, first_seed: int, most: int = 1500) -> None:
        root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
        self._folder = root / f"mote_shards_{os.getpid()}"
        self._folder.mkdir(parents=True)
        context = get_context("fork")
        self._workers = [
            context.Process(target=_render_forever, args=(self._folder, first_seed + index, workers), daemon=True)
            for index in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._most = most
        self._fresh: list[Loaded] = []
        self._pool: list[Loaded] = []
        self._lock = threading.Lock()
        self._stopping = False
        self.rendered = 0

    def start(self, device: torch.device) -> None:
        """Begin moving shards to the device, in a thread of its own."""
        self._device = device
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        # On a stream of its own a copy need not wait for all the work that training has queued.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._collect_until_stopped()

    def _collect_until_stopped(self) -> None:
        while not self._stopping:
            names = sorted(self._folder.glob("*.shard")) if len(self._fresh) < _WAITING // 2 else []
            if not names:
                time.sleep(0.01)
            for path in names:
                with path.open("rb") as file:
                    loaded = load(pickle.load(file), self._device)
                path.unlink()
                with self._lock:
                    self._fresh.append(loaded)
                    self.rendered += 1

    def take(self, rng: Random, count: int) -> list[Loaded]:
        """`count` shards, at most half of them old; waits for the first ones."""
        while True:
            with self._lock:
                if self._fresh or len(self._pool) >= 2 * count:
                    break
            time.sleep(0.01)
        with self._lock:
            fresh, self._fresh = self._fresh[:count], self._fresh[count:]
            old = rng.sample(self._pool, min(count - len(fresh), len(self._pool)))
            self._pool = (self._pool + fresh)[-self._most :]
        return fresh + old

    def close(self) -> None:
        """Stop the workers and remove their folder."""
        self._stopping = True
        for worker in self._workers:
            worker.terminate()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)
