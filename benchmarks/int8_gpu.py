"""Products of int8 weights on a GPU (W8A8) against bfloat16 and FP8: the linear layers of a 7B model, by tilings.

    python -m benchmarks.int8_gpu [--rows 1 4 16 64 256 1024 8192] [--layers 28] [--only layer] [--repeats 20]

Prints for each number of rows and each way to multiply the milliseconds of each of a layer's four products, for all
layers, their sum, how many times as fast bfloat16 is computed, what was reached (GB/s of weights, up to 64 rows; above,
10^12 operations a second), and whether the result has the bits that it should have. Rounding activations is included.
`layer` is what the engine computes (quant/int8_gpu.py); `library` is torch._int_mm and a kernel that scales. A way that
fails says why, and the others go on. Launches are recorded into a CUDA graph, as the engine does for few rows; each of
them reads weights of its own, so that no cache holds them.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from beheld.quant.int8_kernel import ManyTiles

# Outputs and inputs of a layer of Qwen2.5-7B: q, k and v; o; gate and up; down.
SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
# Of a product measured, at most.
_SECONDS = 0.4
# Up to so many rows reading the weights takes all the time.
_FEW_ROWS = 64

# Multiplies a row-major input (T, K) by the layer of this place.
Way = Callable[[Tensor, int], Tensor]


def milliseconds(act: Callable[[], None], repeats: int) -> float:
    """Return the median time of a recorded act."""
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    found: list[float] = []
    graph.replay()
    while len(found) < repeats and (len(found) < 3 or sum(found) < 1e3 * _SECONDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


class Weights:
    """The weights of one shape in all layers, rounded from the same numbers."""

    def __init__(self, outputs: int, inputs: int, layers: int) -> None:
        from beheld.models.one_row import OneRowFloat8Linear, OneRowLinear
        from beheld.quant import float8, int8
        from beheld.quant.int8_gpu import Int8GPULinear
        from beheld.quant.linear import linear_of

        self.outputs, self.inputs, self.layers = outputs, inputs, layers
        whole = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda").mul_(0.02) for _ in range(layers)]
        self.plain = [linear_of(each) for each in whole]
        self.plain_rows = [OneRowLinear(each) for each in self.plain]
        self.eights = [float8.Float8Linear(*float8.rounded_rows(each), None, torch.bfloat16) for each in whole]
        self.eight_rows = [OneRowFloat8Linear.of(each) for each in self.eights]
        self.whole = [Int8GPULinear(*int8.rounded_weight(each), None, torch.bfloat16) for each in whole]

    def expected(self, x: Tensor) -> Tensor:
        """Return what int8 products give, to the last bit."""
        from beheld.quant.int8_gpu import rounded_rows

        layer = self.whole[0]
        rounded, step = rounded_rows(x)
        found = torch.empty(len(x), self.outputs, dtype=torch.bfloat16, device="cuda")
        for at in range(0, self.outputs, 4096):
            part = slice(at, at + 4096)
            exact = (rounded.double() @ layer.rows_NK[part].double().t()).float()
            found[:, part] = exact * step.unsqueeze(1) * layer.scale_N[part]
        return found


def ways(rows: int, weights: Weights) -> Iterator[tuple[str, Way]]:
    """Yield ways to multiply, by name; those whose name begins with "int8" must have the expected bits."""
    from beheld.platform.registry import platform_of
    from beheld.quant import float8, int8_gpu, int8_kernel, int8_row_kernel
    from beheld.quant.int8_kernel import FewTiles
    from beheld.quant.int8_row_kernel import RowTiles

    facts = platform_of("cuda").kernel_facts(torch.device("cuda"))
    outputs = weights.outputs

    def scaled_mm(x: Tensor, place: int) -> Tensor:
        layer = weights.eights[place]
        rounded, scale = float8.rounded_rows(x)
        scales = {"scale_a": scale.unsqueeze(1), "scale_b": layer.scale_N.unsqueeze(0)}
        return torch._scaled_mm(rounded, layer.rows_NK.t(), out_dtype=torch.bfloat16, **scales)

    def library(x: Tensor, place: int) -> Tensor:
        layer = weights.whole[place]
        rounded, step = int8_gpu.rounded_rows(x)
        y = x.new_empty(rows, outputs)
        int8_kernel.add_parts(torch._int_mm(rounded, layer.rows_NK.t()).unsqueeze(0), step, layer.scale_N, None, y)
        return y

    def few(x: Tensor, place: int, tiles: FewTiles | None) -> Tensor:
        layer = weights.whole[place]
        y = x.new_empty(rows, outputs)
        given = *int8_gpu.rounded_rows(x), layer.rows_NK, layer.scale_N, None, y, facts.multiprocessors
        int8_kernel.few_rows(*given, tiles)
        return y

    def many(x: Tensor, place: int, tiles: ManyTiles) -> Tensor:
        layer = weights.whole[place]
        y = x.new_empty(rows, outputs)
        given = *int8_gpu.rounded_rows(x), layer.rows_NK, layer.scale_N, None, y, facts.multiprocessors
        int8_kernel.many_rows(*given, tiles)
        return y

    def single(x: Tensor, place: int, tiles: RowTiles, early: bool = True) -> Tensor:
        layer = weights.whole[place]
        early = early and facts.early_launch
        rounded = torch.empty(x.shape, dtype=torch.int8, device="cuda")
        step = torch.empty(1, device="cuda")
        int8_kernel.rounded_rows(x, rounded, step, early=early)
        y = x.new_empty(outputs)
        int8_row_kernel.row(rounded, step, layer.rows_NK, layer.scale_N, None, None, y, early=early, tiles=tiles)
        return y.unsqueeze(0)

    yield "bf16, library", lambda x, place: weights.plain[place](x)
    if rows == 1:
        yield "bf16, the engine's row", lambda x, place: weights.plain_rows[place](x)
        yield "fp8, the engine's row", lambda x, place: weights.eight_rows[place](x)
    yield "fp8, library", scaled_mm
    yield "fp8, the engine's layer", lambda x, place: weights.eights[place](x)
    yield "int8, layer", lambda x, place: weights.whole[place](x)
    if rows > 16:
        yield "int8, library", library
    if rows == 1:
        for sizes in ((16, 128, 4), (16, 256, 8), (8, 128, 4), (8, 256, 4), (8, 512, 8), (4, 256, 4), (4, 512, 4),
                      (4, 1024, 8), (2, 512, 4)):  # fmt: skip
            yield f"int8, row {sizes}", functools.partial(single, tiles=RowTiles(*sizes))
        yield "int8, row (8, 256, 4), not early", functools.partial(single, tiles=RowTiles(8, 256, 4), early=False)
    if rows <= 256:
        tall = 16 if rows <= 16 else 32 if rows <= 32 else 64
        columns = -(-outputs // 64)
        for programs in (1, 2, 4, 8):
            parts = max(1, min(16, programs * facts.multiprocessors // (columns * -(-rows // tall))))
            for width, depth, stages in ((64, 128, 5), (64, 256, 4), (128, 128, 4)):
                if programs == 2 or width == 64:
                    tiles = FewTiles(width, tall, depth, 4, stages, parts)
                    yield f"int8, few {width}x{tall}x{depth} s{stages} p{programs}", functools.partial(few, tiles=tiles)
    if rows >= 64:
        for large in _many_candidates(rows, facts.copies_tiles):
            name = f"{large.rows}x{large.outputs}x{large.inputs} w{large.warps} s{large.stages}"
            name += f" {'copied' if large.copied else 'threads'} p{large.programs}"
            yield f"int8, many {name}", functools.partial(many, tiles=large)


def _many_candidates(rows: int, copies_tiles: bool) -> Iterator[ManyTiles]:
    from beheld.quant.int8_kernel import ManyTiles

    yield ManyTiles(128, 128, 128, 8, 3)
    yield ManyTiles(128, 256, 128, 8, 3)
    if rows <= 256:
        yield ManyTiles(64, 128, 128, 4, 4)
    if not copies_tiles:
        return
    if rows <= 256:
        yield ManyTiles(64, 128, 128, 4, 4, copied=True)
        yield ManyTiles(64, 256, 128, 4, 4, copied=True)
    yield ManyTiles(128, 128, 128, 4, 4, copied=True)
    yield ManyTiles(128, 128, 128, 8, 3, copied=True)
    yield ManyTiles(128, 256, 128, 8, 3, copied=True)
    yield ManyTiles(128, 128, 128, 8, 4, copied=True, programs=1)
    yield ManyTiles(128, 256, 128, 8, 3, copied=True, programs=1)
    yield ManyTiles(128, 256, 128, 8, 4, copied=True, programs=1)
    yield ManyTiles(256, 128, 128, 8, 4, copied=True, programs=1)
    yield ManyTiles(256, 128, 128, 8, 3, copied=True, programs=1)


def measure(way: Way, weights: Weights, x: Tensor, repeats: int) -> float:
    """Return the milliseconds of all layers."""

    def act() -> None:
        for place in range(weights.layers):
            way(x, place)

    return milliseconds(act, repeats)


def reason(error: Exception) -> str:
    """Return what fits into a cell of the table."""
    words = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {words[:160]}".replace("|", "/")


def compare(counts: Sequence[int], layers: int, repeats: int, only: str) -> None:
    """Print a table for each number of rows."""
    import triton

    stored = [Weights(outputs, inputs, layers) for outputs, inputs in SHAPES]
    numbers = layers * sum(outputs * inputs for outputs, inputs in SHAPES)
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, Triton {triton.__version__}; {layers} layers, "
        f"{numbers / 2**30:.2f} GiB in 8 bits"
    )
    for rows in counts:
        inputs = {k: torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _, k in SHAPES}
        expected = [weights.expected(inputs[weights.inputs]) for weights in stored]
        reached = "GB/s" if rows <= _FEW_ROWS else "10^12/s"
        shapes = " | ".join(f"{n}x{k}" for n, k in SHAPES)
        print(f"\n| {rows} rows, ms | {shapes} | all | bf16 / this | {reached} | bits |")
        print("|---" * (len(SHAPES) + 5) + "|", flush=True)
        base, best = 0.0, [(float("inf"), "")] * len(SHAPES)
        for ways_here in zip(*(ways(rows, weights) for weights in stored), strict=True):
            name = ways_here[0][0]
            if only not in name and not name.startswith("bf16"):
                continue
            cells, found, right = [], [], True
            for place, ((_, way), weights, want) in enumerate(zip(ways_here, stored, expected, strict=True)):
                x = inputs[weights.inputs]
                try:
                    right &= not name.startswith("int8") or torch.equal(way(x, 0), want)
                    took = measure(way, weights, x, repeats)
                except Exception as error:
                    cells.append(reason(error))
                    continue
                found.append(took)
                cells.append(f"{took:.3f}")
                if name.startswith("int8"):
                    best[place] = min(best[place], (took, name))
            total = sum(found) if len(found) == len(SHAPES) else float("nan")
            if name == "bf16, library":
                base = total
            speed = numbers * (2 if name.startswith("bf16") else 1) / total / 1e6
            if rows > _FEW_ROWS:
                speed = 2 * numbers * rows / total / 1e9
            bits = "" if not name.startswith("int8") else "right" if right else "WRONG"
            print(
                f"| {name} | {' | '.join(cells)} | {total:.3f} | {base / total:.2f} | {speed:.0f} | {bits} |",
                flush=True,
            )
        if best[0][1]:
            total = sum(took for took, _ in best)
            words = "; ".join(f"{n}x{k}: {way}" for (n, k), (_, way) in zip(SHAPES, best, strict=True))
            print(f"best int8 by shape {total:.3f} ms, {base / total:.2f} times bf16: {words}", flush=True)
        del inputs, expected
        torch.cuda.empty_cache()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="ways whose names hold this, and bfloat16")
    arguments = parser.parse_args()
    with torch.inference_mode():
        compare(arguments.rows, arguments.layers, arguments.repeats, arguments.only)


if __name__ == "__main__":
    main()
