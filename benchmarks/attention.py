"""Attention kernels on one GPU against the hardware's limits: `python -m benchmarks.attention [decode] [prefill]`.

Each line is one workload: the backend's time per layer, the floor (bytes of keys and values over the memory's rate, or
operations over the matrix units' rate), and PyTorch's own attention on dense tensors. Decoding runs under a CUDA graph
of many layers with a cache each, so that no layer finds its keys in the GPU's own cache.

Shapes: B sequences, L positions, H query heads, K key-value heads, C head size.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.triton_paged import TritonBackend

# Measured on an H200: a large copy, and a large bf16 matrix product.
BYTES_PER_S = 4.3e12
FLOP_PER_S = 788e12
BLOCK = 16


@dataclass(frozen=True)
class Model:
    """A text model's attention; all heads of 128 elements."""

    name: str
    heads: int
    kv_heads: int
    layers: int
    size: int = 128


MODELS = (Model("3B", 16, 2, 36), Model("7B", 28, 4, 28))
DECODES = (
    (1, 512),
    (1, 4096),
    (1, 8192),
    (1, 12288),
    (1, 32768),
    (1, 131072),
    (16, 12288),
    (8, 65536),
    (64, 512),
    (64, 4096),
    (256, 512),
    (256, 4096),
)
PREFILLS = ((1, 282), (1, 1024), (1, 8192), (64, 1024))


def metadata_of(starts: list[int], lengths: list[int]) -> AttnMetadata:
    """Metadata of one full group; blocks are scattered over the cache, as they are after a while of serving."""
    counts = np.array(lengths) - np.array(starts)
    needed = [-(-n // BLOCK) for n in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for row, blocks in enumerate(order.split(needed)):
        tables[row, : len(blocks)] = blocks
    rows = np.repeat(np.arange(len(lengths)), counts)
    positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, lengths, strict=True)])
    slots = tables.numpy()[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return AttnMetadata(
        num_decodes=int((counts == 1).sum()),
        starts=tuple(starts),
        lengths=tuple(lengths),
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        cu_q_B1=torch.tensor([0, *counts.cumsum().tolist()], dtype=torch.int32, device="cuda"),
        groups=(GroupMetadata(torch.from_numpy(slots).cuda(), tables.cuda(), None),),
        block_size=BLOCK,
    )


def caches(model: Model, positions: int) -> list[LayerKV]:
    """As many layers as the model has, or fewer where that is a lot of memory already."""
    blocks = positions // BLOCK + 1
    shape = (blocks, BLOCK, model.kv_heads, model.size)
    layers = model.layers if positions <= 1 << 17 else 4
    return [LayerKV(random(shape), random(shape), 0) for _ in range(layers)]


def random(shape: tuple[int, ...]) -> Tensor:
    """Normal numbers in bf16: on zeros a GPU runs faster than on anything real."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def graph_us(launch: Callable[[], object], seconds: float = 0.1) -> float:
    """Microseconds of one replay of what `launch` launches."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return _time_us(graph.replay, seconds)


def _time_us(call: Callable[[], object], seconds: float) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    rounds = max(3, int(seconds * 1e3 / max(first.elapsed_time(last), 1e-3)))
    first.record()
    for _ in range(rounds):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / rounds


def inputs(model: Model, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a step, (T, H or K, C)."""
    kv_shape = (tokens, model.kv_heads, model.size)
    return random((tokens, model.heads, model.size)), random(kv_shape), random(kv_shape)


def decode_us(backend: AttentionBackend, model: Model, layers: list[LayerKV], metadata: AttnMetadata) -> float:
    """Microseconds per layer of one decode step under a graph."""
    q, k, v = inputs(model, len(metadata.lengths))

    def launch() -> None:
        backend.begin(metadata)
        for kv in layers:
            backend.attend(q, k, v, kv, metadata, model.size**-0.5, None)

    return graph_us(launch) / len(layers)


def dense_decode_us(model: Model, batch: int, length: int, num_layers: int) -> float:
    """PyTorch's attention on dense keys and values of equal length."""
    shape = (batch, model.kv_heads, length, model.size)
    kv = [(random(shape), random(shape)) for _ in range(num_layers)]
    q = random((batch, model.heads, 1, model.size))

    def launch() -> None:
        for k, v in kv:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return graph_us(launch) / num_layers


def bench_decode(model: Model, batch: int, length: int) -> dict[str, float | str]:
    """One decode workload; every sequence has `length` positions."""
    layers = caches(model, batch * length)
    metadata = metadata_of([length - 1] * batch, [length] * batch)
    ours = decode_us(TritonBackend(), model, layers, metadata)
    num_layers = len(layers)
    del layers
    dense = dense_decode_us(model, batch, length, num_layers)
    floor = batch * length * 2 * model.kv_heads * model.size * 2 / BYTES_PER_S * 1e6
    return _line(f"decode {model.name} {batch}x{length}", ours, floor, dense)


def bench_prefill(model: Model, batch: int, length: int) -> dict[str, float | str]:
    """One prefill workload of `batch` new sequences."""
    (kv, *_) = caches(model, batch * length)
    metadata = metadata_of([0] * batch, [length] * batch)
    backend = TritonBackend()
    q, k, v = inputs(model, batch * length)
    backend.begin(metadata)
    ours = _time_us(lambda: backend.attend(q, k, v, kv, metadata, model.size**-0.5, None), 0.1)
    q, k, v = (x.view(batch, length, -1, model.size).transpose(1, 2).contiguous() for x in (q, k, v))
    theirs = _time_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 0.1)
    floor = 4 * model.heads * model.size * batch * length * (length + 1) / 2 / FLOP_PER_S * 1e6
    return _line(f"prefill {model.name} {batch}x{length}", ours, floor, theirs)


def launch_us(model: Model) -> float:
    """Host microseconds to launch one layer of a decode step, no graph."""
    metadata = metadata_of([511] * 4, [512] * 4)
    (kv, *_) = caches(model, 4 * 512)
    backend = TritonBackend()
    q, k, v = inputs(model, 4)
    backend.begin(metadata)
    backend.attend(q, k, v, kv, metadata, 1.0, None)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(200):
        backend.attend(q, k, v, kv, metadata, 1.0, None)
    return (time.perf_counter() - began) / 200 * 1e6


def _line(name: str, ours: float, floor: float, dense: float) -> dict[str, float | str]:
    return {
        "workload": name,
        "us": round(ours, 2),
        "floor_us": round(floor, 2),
        "of_floor": round(ours / floor, 2),
        "torch_dense_us": round(dense, 2),
    }


def main(parts: list[str]) -> None:
    """Print one JSON line per workload."""
    for model in MODELS:
        if not parts or "decode" in parts:
            print(json.dumps({"workload": f"launch {model.name}", "host_us": round(launch_us(model), 1)}), flush=True)
            for batch, length in DECODES:
                print(json.dumps(bench_decode(model, batch, length)), flush=True)
        if not parts or "prefill" in parts:
            for batch, length in PREFILLS:
                print(json.dumps(bench_prefill(model, batch, length)), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
