"""Products of 4-bit weights on a GPU against bfloat16: the linear layers of a 7B model, one after the other.

    python -m benchmarks.int4_gpu [--rows 1 4 16 64 256 1024] [--layers 28] [--group 128]

Prints for each number of rows the milliseconds of all layers' products (what a next token takes outside attention,
norms and the head), the share of the memory's bandwidth that reading the weights reaches, the same for bfloat16, and
the greatest error against the dequantized weights. `kernel` unpacks in registers weights with a scale and a low
each, `centered` those with scales alone, as symmetric checkpoints have them, and `library` dequantizes for the call:
int4_gpu.MOST_ROWS should be where the last becomes faster. Launches are recorded into a CUDA graph, as the engine does.
bfloat16 is the library's product; the engine computes one row of it by models/one_row_kernel.py, which `one row` times.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Outputs and inputs of a layer of Qwen2.5-7B: q, k and v; o; gate and up; down.
SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
_REPEATS = 20


def milliseconds(act: Callable[[], None]) -> float:
    """Return the median time of a recorded act."""
    act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    found = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def compare(rows: Sequence[int], layers: int, group: int) -> None:
    """Print a table."""
    from beheld.models.one_row import OneRowLinear
    from beheld.quant import int4_gpu, linear
    from beheld.quant.grouped import GroupedNumbers

    def made(outputs: int, inputs: int) -> int4_gpu.Int4GPULinear:
        whole = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
        scale = torch.rand(outputs, inputs // group, device="cuda").mul_(0.01).add_(0.002).half().float()
        return int4_gpu.Int4GPULinear(GroupedNumbers(whole, scale, -7.25 * scale, 4), None, torch.bfloat16)

    stored = [[made(*shape) for shape in SHAPES] for _ in range(layers)]
    lows = [[layer.low_GN for layer in row] for row in stored]
    plain = [[linear.linear_of(random_weight(*shape)) for shape in SHAPES] for _ in range(layers)]
    numbers = layers * sum(outputs * inputs for outputs, inputs in SHAPES)
    kept = sum(p.numel() * p.element_size() for row in stored for layer in row for p in layer.parameters())
    print(
        f"{torch.cuda.get_device_name()}; {layers} layers; int4 in groups of {group} {kept / 2**30:.2f} GiB, "
        f"bf16 {numbers * 2 / 2**30:.2f}"
    )
    print("| rows | kernel, ms | GB/s | centered, ms | library, ms | bf16, ms | GB/s | bf16 / best int4 | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for count in rows:
        inputs = {k: torch.randn(count, k, dtype=torch.bfloat16, device="cuda") for _, k in SHAPES}
        worst = max(_error(layer, inputs[layer.in_features]) for layer in stored[0])
        times = {}
        for name, most in (("kernel", 1 << 30), ("centered", 1 << 30), ("library", 0)):
            int4_gpu.MOST_ROWS = most
            for row, own in zip(stored, lows, strict=True):
                for layer, low in zip(row, own, strict=True):
                    layer.low_GN = None if name == "centered" else low
            times[name] = milliseconds(functools.partial(multiply, stored, inputs))
        whole = milliseconds(functools.partial(multiply, plain, inputs))
        best = min(times["kernel"], times["library"])
        print(
            f"| {count} | {times['kernel']:.3f} | {kept / times['kernel'] / 1e6:.0f} | {times['centered']:.3f} | "
            f"{times['library']:.3f} | {whole:.3f} | {2 * numbers / whole / 1e6:.0f} | {whole / best:.2f} | "
            f"{worst:.1e} |",
            flush=True,
        )
        if count == 1:
            single = [[OneRowLinear(layer) for layer in row] for row in plain]
            found = milliseconds(functools.partial(multiply, single, inputs))
            print(f"one row of bfloat16 by the engine's kernel: {found:.3f} ms")


def random_weight(*sizes: int) -> Tensor:
    """Return random numbers of a weight's size."""
    return torch.randn(sizes, dtype=torch.bfloat16, device="cuda").mul_(0.02)


def multiply(layers: Sequence[Sequence[nn.Module]], inputs: Mapping[int, Tensor]) -> None:
    """Multiply, layer after layer, by the input of its size."""
    for row in layers:
        for layer in row:
            layer(inputs[int(layer.in_features)])  # type: ignore[arg-type]


def _error(layer: nn.Module, x: Tensor) -> float:
    """Return the greatest error of an output, as a share of the outputs' size, against the dequantized weights."""
    want = x.float() @ layer.numbers.dequantized().t()  # type: ignore[operator, union-attr]
    return float((layer(x).float() - want).abs().amax() / want.norm() * want.numel() ** 0.5)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--group", type=int, default=128)
    arguments = parser.parse_args()
    compare(arguments.rows, arguments.layers, arguments.group)


if __name__ == "__main__":
    main()
