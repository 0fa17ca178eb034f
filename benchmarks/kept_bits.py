"""Products of weights that a GPU keeps in their bits, compared with bfloat16: FP8 by blocks, and MXFP4 experts.

    python -m benchmarks.kept_bits [fp8] [fp8-experts] [mxfp4] [--rows 1 16 64 256 2048 8192] [--layers 4]

Prints for each number of rows the milliseconds of all layers' products (what a next token takes outside attention,
norms and the head), the same for bfloat16, the time of reading the weights alone at the card's bandwidth, and the
error against the dequantized weights, as a share of the result. Shapes: the linear layers of Qwen2.5-7B; the experts of
Qwen3-30B-A3B (128, 8 for a token) and of gpt-oss-20b (32, 4 for a token). Launches are recorded into a CUDA graph, as
the engine does; a few layers are timed and the time is that of as many as the model has.

Shapes: T rows, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.int4_gpu import SHAPES, milliseconds, multiply, random_weight

BF16 = torch.bfloat16
# Bytes that an H100 copies in a second.
_COPIED = 1 << 30


@dataclass(frozen=True)
class ExpertsShape:
    """The experts of a model: how many, how many a token takes, its size, theirs, and the number of layers."""

    count: int
    choices: int
    hidden: int
    inner: int
    layers: int

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Outputs and inputs of both matrices."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)


QWEN3_30B = ExpertsShape(128, 8, 2048, 768, 48)
GPT_OSS_20B = ExpertsShape(32, 4, 2880, 2880, 24)
DENSE_LAYERS = 28


class Gate(nn.Module):
    """What experts do between their products, in short."""

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def bandwidth() -> float:
    """Return the bytes that the card reads in a second, of a large copy."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED / milliseconds(lambda: target.copy_(source)) * 1e3


def fp8(rows: Sequence[int], layers: int, speed: float) -> None:
    """Compare linear layers."""
    from beheld.quant.float8_block import BlockFloat8Linear, BlockNumbers
    from beheld.quant.linear import linear_of

    def made(outputs: int, inputs: int) -> BlockFloat8Linear:
        return BlockFloat8Linear(BlockNumbers(_eights(outputs, inputs), _scales(outputs, inputs)), None, BF16)

    stored = [[made(*shape) for shape in SHAPES] for _ in range(layers)]
    whole = [[linear_of(random_weight(*shape)) for shape in SHAPES] for _ in range(layers)]
    times = DENSE_LAYERS / layers
    floor = times * sum(p.numel() * p.element_size() for row in stored for layer in row for p in layer.parameters())
    _head("FP8 by blocks, 7B", floor / speed * 1e3)
    for count in rows:
        inputs = {k: torch.randn(count, k, dtype=BF16, device="cuda") for _, k in SHAPES}
        layer, x = stored[0][3], inputs[SHAPES[3][1]]
        error = _error(layer(x), x.float() @ layer.numbers.dequantized().t())
        kept, plain = (times * milliseconds(functools.partial(multiply, each, inputs)) for each in (stored, whole))
        _row(count, kept, plain, error)


def fp8_experts(rows: Sequence[int], layers: int, speed: float) -> None:
    """Compare experts of FP8 by blocks."""
    from beheld.quant.float8_block import BlockFloat8Experts, BlockNumbers

    form = QWEN3_30B

    def made() -> BlockFloat8Experts:
        both = [
            BlockNumbers(_eights(form.count, *sizes), _scales(*sizes).repeat(form.count, 1, 1)) for sizes in form.sizes
        ]
        return BlockFloat8Experts(Gate(), both[0], both[1], BF16)

    _experts("FP8 by blocks, experts of 30B-A3B", form, made, rows, layers, speed, _eight_weights)


def mxfp4(rows: Sequence[int], layers: int, speed: float) -> None:
    """Compare experts of MXFP4."""
    from beheld.quant.mxfp4_experts import MXFP4Experts, repacked

    form = GPT_OSS_20B

    def entries(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        shape = form.count, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        return repacked(blocks, torch.randint(118, 124, shape, dtype=torch.uint8, device="cuda"))

    def made() -> MXFP4Experts:
        both = [entries(*sizes) for sizes in form.sizes]
        return MXFP4Experts(Gate(), both[0], both[1], [inputs // 32 for _, inputs in form.sizes])

    _experts("MXFP4, experts of gpt-oss-20b", form, made, rows, layers, speed, _four_weights)


def _experts(
    title: str,
    form: ExpertsShape,
    make: Callable[[], Any],
    rows: Sequence[int],
    layers: int,
    speed: float,
    weights_of: Callable[[Any], list[Tensor]],
) -> None:
    stored = [make() for _ in range(layers)]
    whole = [[random_weight(form.count, k, n) for n, k in form.sizes] for _ in range(min(layers, 4))]
    each = sum(p.numel() * p.element_size() for p in stored[0].parameters()) / form.count
    first = weights_of(stored[0])
    print(f"| {title}: {each * form.count * form.layers / 2**30:.2f} GiB |")
    for count in rows:
        x = torch.randn(count, form.hidden, dtype=BF16, device="cuda")
        ids = torch.rand(count, form.count, device="cuda").topk(form.choices).indices
        weights = torch.rand(count, form.choices, device="cuda")
        used = len(ids.unique())
        _head(f"{used} experts used", each * used * form.layers / speed * 1e3)
        got = stored[0](x[:4], ids[:4], weights[:4])
        want = _one_by_one(x[:4].float(), ids[:4], weights[:4], first)
        kept = milliseconds(lambda a=(x, ids, weights): [layer(*a) for layer in stored])
        plain = milliseconds(lambda a=(x, ids, weights): [_grouped(*a, *pair) for pair in whole])
        _row(count, kept * form.layers / layers, plain * form.layers / len(whole), _error(got, want))


def _one_by_one(x_TK: Tensor, ids: Tensor, weights: Tensor, both: Sequence[Tensor]) -> Tensor:
    found = torch.zeros_like(x_TK)
    for token in range(x_TK.shape[0]):
        for place, expert in enumerate(ids[token].tolist()):
            hidden = Gate()._apply_gate(both[0][expert].float() @ x_TK[token])
            found[token] += weights[token, place] * (both[1][expert].float() @ hidden)
    return found


def _grouped(x: Tensor, ids: Tensor, weights: Tensor, up_EKN: Tensor, down_EKN: Tensor) -> None:
    """Do what the engine does with experts in bfloat16."""
    chosen_S, order_S = ids.reshape(-1).sort(stable=True)
    ends_E = torch.searchsorted(chosen_S, torch.arange(len(up_EKN), device="cuda"), right=True).int()
    inner = nn.functional.grouped_mm(x.index_select(0, order_S // ids.shape[1]), up_EKN, offs=ends_E)
    y_SK = nn.functional.grouped_mm(Gate()._apply_gate(inner), down_EKN, offs=ends_E)
    found = torch.empty_like(y_SK).index_copy_(0, order_S, y_SK).view(*ids.shape, -1)
    (found * weights.unsqueeze(2).to(BF16)).sum(1)


def _eight_weights(experts: Any) -> list[Tensor]:
    return [experts._numbers(name).dequantized() for name in ("gate_up", "down")]


def _four_weights(experts: Any) -> list[Tensor]:
    from beheld.quant.mxfp4_experts import dequantized, unpacked

    groups = [inputs // 32 for _, inputs in GPT_OSS_20B.sizes]
    stored = [(getattr(experts, f"{name}_bytes"), getattr(experts, f"{name}_exponent")) for name in ("gate_up", "down")]
    return [dequantized(*unpacked(*each, n)).transpose(1, 2) for each, n in zip(stored, groups, strict=True)]


def _eights(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=BF16, device="cuda").mul_(40).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _scales(outputs: int, inputs: int) -> Tensor:
    return torch.rand((outputs // 128, inputs // 128), device="cuda").mul_(4e-4).add_(4e-4)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def _head(title: str, floor: float) -> None:
    print(f"| {title} | kept, ms | bf16, ms | bf16 / kept | error | (reading alone: {floor:.3f} ms)")


def _row(rows: int, kept: float, plain: float, error: float) -> None:
    print(f"| {rows} rows | {kept:.3f} | {plain:.3f} | {plain / kept:.2f} | {error:.1e} |", flush=True)


FORMS = {"fp8": fp8, "fp8-experts": fp8_experts, "mxfp4": mxfp4}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", choices=FORMS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, copies {speed / 1e12:.2f} TB/s")
    for form in arguments.forms or FORMS:
        with torch.inference_mode():
            FORMS[form](arguments.rows, arguments.layers, speed)


if __name__ == "__main__":
    main()
