"""What the kinds of cache are measured against: bytes that follow from a shape, and engines that take turns."""

from __future__ import annotations

import threading
from pathlib import Path

from benchmarks import caches, shapes


def test_bytes_of_a_hybrid(tmp_path: Path) -> None:
    """Qwen3.5-4B: 24 layers with the delta rule, 8 with attention, a head that shares its weights with embeddings."""
    path = shapes.checkpoint("Qwen3.5-4B", tmp_path)
    hidden, inner = 2560, 9216
    mlp = 3 * hidden * inner
    rule = hidden * (8192 + 4096 + 2 * 32) + 4096 * hidden
    attention = hidden * (2 * 16 + 2 * 4) * 256 + 16 * 256 * hidden
    products = 32 * mlp + 24 * rule + 8 * attention + 248320 * hidden
    assert 0 <= caches.token_bytes(path) - 2 * products < 0.001 * 2 * products
    assert caches.state_bytes(path) == 2 * 24 * 32 * 128 * 128 * 4


def test_a_token_reads_the_experts_that_it_takes(tmp_path: Path) -> None:
    path = shapes.checkpoint("GLM-Flash-16", tmp_path)
    expert = 3 * 2048 * 1536
    dense = 3 * 2048 * 10240
    attention = 2048 * (768 + 576) + 768 * 20 * 256 + 512 * 20 * (192 + 256) + 20 * 256 * 2048
    products = 16 * attention + dense + 15 * (4 + 1) * expert + 15 * 64 * 2048 + 154880 * 2048
    assert 0 <= caches.token_bytes(path) - 2 * products < 0.001 * 2 * products


def test_engines_take_turns(tmp_path: Path) -> None:
    """Nobody measures before all have started, and never two at once."""
    inside, most = [], []

    def measure(name: str) -> None:
        with caches.Turn(tmp_path, 3)(name):
            inside.append(name)
            most.append((len(inside), len(list(tmp_path.glob("*.ready")))))
            inside.remove(name)

    threads = [threading.Thread(target=measure, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [(1, 3)] * 3
