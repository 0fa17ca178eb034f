"""Which checkpoints that have short names fit this machine, by their number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from beheld.families import page, registry
from beheld.families.family import ShortName
from beheld.platform.platform import Platform
from beheld.platform.registry import choose
from beheld.tools.plan import STEP_BYTES

# The share of an accelerator's memory that an engine takes by default.
_SHARE = 0.9
# What a step on a CPU takes, and the least cache that is of use.
_CPU_STEP_BYTES = 1 << 30
# Option `quantization` -> bytes of a rounded parameter, best first, where the device multiplies numbers of few bits.
_AT_LOAD = {"int8": 1.06, "int4": 0.6}
# Billions of parameters that are not rounded (embeddings, towers): at most so many, and this share of a small model.
# For Qwen2.5-VL of 3B and 7B the result differs by less than a tenth from what the engine counts.
_MOST_SPARED, _SPARED_SHARE = 1.2, 0.4


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
    width = 4.0 if platform.default_dtype("bfloat16")[0] == "float32" else 2.0
    ways: list[str | None] = [None]
    if platform.shares_host_memory and platform.no_grouped_products is None:
        ways += _AT_LOAD
    for short in registry.short_names().values():
        sizes = [(way, weights_bytes(short.billions, width, way, short.embedding_billions) + steps) for way in ways]
        way, size = next((each for each in sizes if each[1] <= room), sizes[0])
        yield Fit(short, size, way, size <= room)


def weights_bytes(billions: float, width: float, quantization: str | None, embeddings: float = 0.0) -> int:
    """Return about how many bytes the weights of so many parameters take.

    Args:
        width: bytes of a parameter that is not rounded.
        quantization: how they are rounded as they are loaded; None if they are not.
        embeddings: billions of them that are known to be of embeddings.
    """
    spared = billions if quantization is None else max(embeddings, min(_SPARED_SHARE * billions, _MOST_SPARED))
    return int(1e9 * (spared * width + (billions - spared) * _AT_LOAD.get(quantization or "", 0.0)))


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
