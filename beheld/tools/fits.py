"""Which checkpoints that have short names fit this machine, by their number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from beheld.engine.setup import rounds_at_load
from beheld.families import page, registry
from beheld.families.family import ShortName
from beheld.platform.platform import Platform
from beheld.platform.registry import choose
from beheld.tools.plan import STEP_BYTES

# The share of an accelerator's memory that an engine takes by default.
_SHARE = 0.9
# What a step on a CPU takes, and the least cache that is of use.
_CPU_STEP_BYTES = 1 << 30


@dataclass(frozen=True)
class _Rounding:
    """What the option `quantization` rounds on a device. The result differs from what the engine counts by less than a
    tenth for Qwen2.5-VL of 3B and 7B, and Qwen3-VL-30B-A3B.

    Attributes:
        width: bytes of a rounded parameter.
        most_spared, spared_share: billions of parameters that are not rounded (embeddings, towers, on a GPU also the
            head): at most so many, and this share of a small model.
        takes_experts: whether experts are rounded.
    """

    width: float
    most_spared: float
    spared_share: float
    takes_experts: bool = True


# Best first.
_ON_HOST = {"int8": _Rounding(1.06, 1.2, 0.4), "int4": _Rounding(0.6, 1.2, 0.4)}
_ON_GPU = {
    "fp8": _Rounding(1.0, 1.8, 0.25),
    "int8": _Rounding(1.0, 1.8, 0.25, takes_experts=False),
    "int4": _Rounding(0.54, 1.8, 0.25, takes_experts=False),
}


@dataclass(frozen=True)
class Fit:
    """How a checkpoint runs on this machine.

    Attributes:
        short: the checkpoint.
        bytes: that it takes, with what steps and a small cache take.
        quantization: the option with which it fits; None if it fits as it is.
        fits: whether it does.
    """

    short: ShortName
    bytes: int
    quantization: str | None
    fits: bool


def machine() -> tuple[Platform, int]:
    """Return the device that an engine takes by default, and its bytes for weights, steps and cache."""
    platform = choose("auto")
    free, total = platform.memory()
    return platform, free if platform.shares_host_memory else int(_SHARE * total)


def fits() -> Iterator[Fit]:
    """Yield how each checkpoint runs here, the smallest first."""
    platform, room = machine()
    steps = _CPU_STEP_BYTES if platform.shares_host_memory else STEP_BYTES
    dtype = platform.default_dtype("bfloat16")[0]
    ways: list[str | None] = [None]
    if not platform.shares_host_memory:
        ways += [way for way in _ON_GPU if rounds_at_load(way, platform, dtype)]
    elif platform.no_grouped_products is None:
        ways += _ON_HOST
    for short in registry.short_names().values():
        sizes = [(way, steps + _bytes(short, dtype, way, not platform.shares_host_memory)) for way in ways]
        way, size = next((each for each in sizes if each[1] <= room), sizes[0])
        yield Fit(short, size, way, size <= room)


def _bytes(short: ShortName, dtype: str, quantization: str | None, on_gpu: bool) -> int:
    width = 4.0 if dtype == "float32" else 2.0
    return weights_bytes(
        short.billions, width, quantization, short.embedding_billions, short.expert_billions, on_gpu=on_gpu
    )


def weights_bytes(
    billions: float,
    width: float,
    quantization: str | None,
    embeddings: float = 0.0,
    experts: float = 0.0,
    *,
    on_gpu: bool = False,
) -> int:
    """Return about how many bytes the weights of so many parameters take.

    On a GPU that does not hold them unrounded they never take more while they are loaded, but for a layer.

    Args:
        width: bytes of a parameter that is not rounded.
        quantization: how they are rounded as they are loaded; None if they are not.
        embeddings, experts: billions of them that are known to be of embeddings, and of experts.
    """
    if quantization is None:
        return int(1e9 * billions * width)
    rounding = (_ON_GPU if on_gpu else _ON_HOST)[quantization]
    spared = max(embeddings, min(rounding.spared_share * billions, rounding.most_spared))
    if not rounding.takes_experts:
        spared = min(billions, spared + experts)
    return int(1e9 * (spared * width + (billions - spared) * rounding.width))


def best_for(modality: str) -> Fit | None:
    """Return what to suggest for a medium: on a CPU the smallest model that takes it, else the largest that fits.

    A large model on a CPU answers slowly. A checkpoint that is quantized at load, or gated, is not suggested if another
    fits.
    """
    takes = {row.name: row.modalities for row in page.tested()}
    found = [each for each in fits() if each.fits and modality in takes[each.short.layout]]
    found = [each for each in found if "gated" not in each.short.licence]
    if not found:
        return None
    on_host = machine()[0].shares_host_memory
    return found[0] if on_host else max(found, key=lambda each: (each.quantization is None, each.short.billions))


def command_for_photographs(begin: str) -> str:
    """Return the line that names the command for a model that takes images and fits this machine.

    Args:
        begin: what stands before the model's name, as "beheld ask -m".
    """
    found = best_for("image")
    if found is None:
        return "For photographs it takes a real model; `beheld models --short` lists some."
    bits = "" if found.quantization is None else f" --quantization {found.quantization}"
    return f"For photographs: {begin} {found.short.name}{bits}"
