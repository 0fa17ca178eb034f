"""Small checkpoints of quantized weights, made of plain ones by the specifications of the formats, with numpy.

Each has a folder `plain` inside: the same model with the numbers that its weights stand for.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_text as text

PLAIN = "plain"
# Embeddings, routers; biases and norms have one dimension, convolutions more than two.
_SPARED = re.compile(r"embed|mlp\.gate\.weight$|pos_emb")
# Stored entries by what follows the module's name, and the numbers that they mean.
Form = Callable[[np.ndarray, int], tuple[dict[str, torch.Tensor], np.ndarray]]


def write(source: Path, path: Path, entry: dict[str, Any], form: Form, spared: str = "$^") -> None:
    """Write the checkpoint `source` into `path` with its linear layers in a form; modules named `spared` stay plain."""
    plain = path / PLAIN
    for folder in (path, plain):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*", PLAIN))
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for count, (name, weight) in enumerate(load_file(source / "model.safetensors").items()):
        meant[name] = weight.float()
        if weight.dim() != 2 or not name.endswith(".weight") or _SPARED.search(name) or re.search(spared, name):
            stored[name] = weight
            continue
        parts, numbers = form(weight.float().numpy(), count)
        stored |= {name.removesuffix("weight") + key: value for key, value in parts.items()}
        meant[name] = torch.from_numpy(numbers)
    save_file({k: v.contiguous() for k, v in stored.items()}, path / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.contiguous() for k, v in meant.items()}, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text.write_json(path / "config.json", config | {"quantization_config": entry})


def as_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Write the numbers of the last dimension as one string of bits, the lowest bit of the first number first."""
    string = (numbers.astype(np.uint32)[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    string = string.reshape(*numbers.shape[:-1], -1, 32)
    return (string << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def block_fp8(blocks: tuple[int, int] | None, suffix: str = "weight_scale_inv") -> Form:
    """FP8 with a scale for each block, or for the whole."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        height, width = blocks or weight_NK.shape
        rows, columns = (-(-size // step) for size, step in zip(weight_NK.shape, (height, width), strict=True))
        scales = np.empty((rows, columns), np.float32)
        meant = np.empty_like(weight_NK)
        eights = torch.empty(weight_NK.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                own = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                scales[row, column] = scale = np.float32(np.abs(weight_NK[own]).max() / 448)
                eights[own] = torch.from_numpy(weight_NK[own] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                meant[own] = eights[own].float().numpy() * scale
        scale_entry = torch.from_numpy(scales if blocks else scales.reshape(()))
        return {"weight": eights, suffix: scale_entry}, meant

    return form


def nvfp4() -> Form:
    """NVFP4 as compressed-tensors stores it: a scale in FP8 for each 16 inputs, and what divides it for the whole."""
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        outputs, inputs = weight_NK.shape
        grouped = weight_NK.reshape(outputs, inputs // 16, 16)
        divisor = np.float32(448 * 6 / np.abs(weight_NK).max())
        scales = torch.from_numpy(np.abs(grouped).max(2) / 6 * divisor).to(torch.float8_e4m3fn)
        factors = (scales.float().numpy() / divisor)[..., None]
        exact = grouped / np.maximum(factors, np.float32(1e-30))
        places = np.abs(np.abs(exact)[..., None] - values).argmin(-1)
        codes = (places + 8 * (exact < 0)).reshape(outputs, inputs).astype(np.uint8)
        parts = {
            "weight_packed": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4),
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([divisor]),
            "input_global_scale": torch.tensor([1.0]),
        }
        meant = values[places] * np.where(exact < 0, np.float32(-1), np.float32(1)) * factors
        return parts, meant.reshape(outputs, inputs).astype(np.float32)

    return form


def rounded(
    weight_NK: np.ndarray, bits: int, groups_K: np.ndarray, zero_range: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Round to whole numbers by group, with zero points from a range.

    Returns:
        Whole numbers (N, K), zero points (N, G), scales (N, G) as float16 holds them, and the numbers that they mean.
    """
    outputs, count = weight_NK.shape[0], int(groups_K.max()) + 1
    random = np.random.default_rng(weight_NK.size)
    zeros_NG = random.integers(*zero_range, size=(outputs, count), endpoint=True).astype(np.int64)
    scales_NG = np.empty((outputs, count), np.float16)
    for group in range(count):
        scales_NG[:, group] = np.abs(weight_NK[:, groups_K == group]).max(1) / (1 << (bits - 1)) + 1e-4
    scale_NK, zero_NK = scales_NG.astype(np.float32)[:, groups_K], zeros_NG[:, groups_K]
    whole_NK = np.clip(np.round(weight_NK / scale_NK) + zero_NK, 0, (1 << bits) - 1).astype(np.int64)
    return whole_NK, zeros_NG, scales_NG, (whole_NK - zero_NK).astype(np.float32) * scale_NK


def awq(group_size: int) -> Form:
    """AWQ's GEMM layout: of eight outputs, a word's places hold numbers 0 2 4 6 1 3 5 7."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers_RN: np.ndarray) -> torch.Tensor:
        rows, outputs = numbers_RN.shape
        placed = numbers_RN.reshape(rows, outputs // 8, 8)[:, :, order]
        return torch.from_numpy(as_words(placed.reshape(rows, outputs), 4))

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        size = weight_NK.shape[1] if group_size == -1 else group_size
        groups_K = np.arange(weight_NK.shape[1]) // size
        whole_NK, zeros_NG, scales_NG, meant = rounded(weight_NK, 4, groups_K, (5, 10))
        parts = {"qweight": words(whole_NK.T), "qzeros": words(zeros_NG.T), "scales": torch.from_numpy(scales_NG.T)}
        return parts, meant

    return form


def gptq(bits: int, group_size: int, less: int, act_order: bool = False) -> Form:
    """GPTQ; `less` is what is taken from zero points: one in v1, nothing in v2."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        inputs = weight_NK.shape[1]
        groups_K = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        if act_order:
            np.random.default_rng(count).shuffle(groups_K)
        whole_NK, zeros_NG, scales_NG, meant = rounded(weight_NK, bits, groups_K, (1, (1 << bits) - 1))
        parts = {
            "qweight": torch.from_numpy(as_words(whole_NK, bits).T),
            "qzeros": torch.from_numpy(as_words(zeros_NG.T - less, bits)),
            "scales": torch.from_numpy(scales_NG.T),
            "g_idx": torch.from_numpy(groups_K.astype(np.int32)),
        }
        return parts, meant

    return form


def whole_numbers(
    bits: int, group_size: int | None, packed: bool, zeros: bool = False, act_order: bool = False, one: bool = False
) -> Form:
    """Whole numbers as compressed-tensors stores them: one scale for each output, group of inputs, or `one` for all."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        outputs, inputs = weight_NK.shape
        groups_K = np.arange(inputs) // (group_size or inputs)
        if act_order:
            np.random.default_rng(count).shuffle(groups_K)
        half = 1 << (bits - 1)
        if one:
            scale = np.float16(np.abs(weight_NK).max() / half + 1e-4)
            whole_NK = np.clip(np.round(weight_NK / np.float32(scale)) + half, 0, 2 * half - 1).astype(np.int64)
            zeros_NG, scales_NG = np.full((1,), half), np.full((1,), scale)
            meant = (whole_NK - half).astype(np.float32) * np.float32(scale)
        else:
            between = (half - 3, half + 2) if zeros else (half, half)
            whole_NK, zeros_NG, scales_NG, meant = rounded(weight_NK, bits, groups_K, between)
        parts = {"weight_scale": torch.from_numpy(scales_NG)}
        if packed:
            parts["weight_packed"] = torch.from_numpy(padded_words(whole_NK, bits))
            parts["weight_shape"] = torch.tensor([outputs, inputs])
        else:
            parts["weight"] = torch.from_numpy((whole_NK - half).astype(np.int8))
        if zeros and packed:
            parts["weight_zero_point"] = torch.from_numpy(padded_words(zeros_NG.T, bits).T)
        elif zeros:
            parts["weight_zero_point"] = torch.from_numpy((zeros_NG - half).astype(np.int8))
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(groups_K.astype(np.int32))
        return parts, meant

    return form


# The numbers of NF4's codes: quantiles of the normal distribution, to 7 digits (QLoRA, appendix E).
NF4 = np.array(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0], np.float32,
)  # fmt: skip


# The numbers of FP4's codes: a sign, two bits of an exponent and one of a fraction, divided by the greatest.
_FP4_HALF = np.array([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], np.float32) / 12
FP4 = np.concatenate([_FP4_HALF, -_FP4_HALF])


def blocks_of_codes(
    blocksize: int, nested: int | None = None, storage: torch.dtype = torch.uint8, kind: str = "nf4"
) -> Form:
    """bitsandbytes' NF4 or FP4: codes in blocks of the whole weight in one row; `nested` quantizes scales likewise."""
    numbers = {"nf4": NF4, "fp4": FP4}[kind]

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        flat = weight_NK.reshape(-1)
        block_of = np.arange(flat.size) // blocksize
        scales = np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, blocksize)).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": blocksize, "shape": list(weight_NK.shape)}
        parts = {"weight.absmax": torch.from_numpy(scales)}
        if nested is not None:
            offset = float(np.float32(scales.mean()))
            levels = np.linspace(-1, 1, 256, dtype=np.float32)
            own = np.arange(scales.size) // nested
            largest = np.maximum.reduceat(np.abs(scales - offset), np.arange(0, scales.size, nested)).astype(np.float32)
            places = np.abs(((scales - offset) / largest[own])[:, None] - levels).argmin(1)
            scales = levels[places] * largest[own] + np.float32(offset)
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
            parts = {
                "weight.absmax": torch.from_numpy(places.astype(np.uint8)),
                "weight.nested_absmax": torch.from_numpy(largest),
                "weight.nested_quant_map": torch.from_numpy(levels),
            }
        codes = np.abs((flat / scales[block_of])[:, None] - numbers).argmin(1).astype(np.uint8)
        meant = (numbers[codes] * scales[block_of]).reshape(weight_NK.shape)
        packed = torch.from_numpy(codes[::2] << 4 | codes[1::2]).view(storage).unsqueeze(1)
        told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts |= {"weight": packed, "weight.quant_map": torch.from_numpy(numbers.copy())}
        return parts | {f"weight.quant_state.bitsandbytes__{kind}": told}, meant

    return form


def eight_bit_rows() -> Form:
    """bitsandbytes' int8: the largest magnitude of each output is 127."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        largest = np.abs(weight_NK).max(1).astype(np.float32)
        scale = largest / np.float32(127)
        whole = np.clip(np.round(weight_NK / scale[:, None]), -127, 127).astype(np.int8)
        parts = {"weight": torch.from_numpy(whole), "SCB": torch.from_numpy(largest)}
        return parts | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, whole.astype(np.float32) * scale[:, None]

    return form


def torchao_integers(bits: int, group_size: int | None, one: bool = False) -> Form:
    """torchao's whole numbers in int8, with zero points: of `bits`; groups of inputs, outputs, or `one` block."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        half = 1 << (bits - 1)
        groups_K = np.arange(weight_NK.shape[1]) // (group_size or weight_NK.shape[1])
        whole_NK, zeros_NG, scales_NG, meant = rounded(weight_NK, bits, groups_K, (half - 2, half + 1))
        if one:
            zeros_NG, scales_NG = zeros_NG[:1, :1], scales_NG[:1, :1]
            meant = (whole_NK - zeros_NG).astype(np.float32) * scales_NG.astype(np.float32)
        parts = {"qdata": whole_NK - half, "zero_point": zeros_NG - half}
        entries = {f"_weight_{name}": torch.from_numpy(value.astype(np.int8)) for name, value in parts.items()}
        return entries | {"_weight_scale": torch.from_numpy(scales_NG)}, meant

    return form


def torchao_nibbles(group_size: int) -> Form:
    """torchao's Int4Tensor: zero points are numbers that are added."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        groups_K = np.arange(weight_NK.shape[1]) // group_size
        whole_NK, zeros_NG, scales_NG, _ = rounded(weight_NK, 4, groups_K, (5, 10))
        added_NG = ((8 - zeros_NG) * scales_NG).astype(np.float16)
        scale_NK, added_NK = (each.astype(np.float32)[:, groups_K] for each in (scales_NG, added_NG))
        packed = (whole_NK[:, ::2] - 8 & 15) | (whole_NK[:, 1::2] - 8 & 15) << 4
        entries = {"qdata": packed.astype(np.uint8).view(np.int8), "scale": scales_NG.T, "zero_point": added_NG.T}
        stored = {f"_weight_{name}": torch.from_numpy(value.copy()) for name, value in entries.items()}
        return stored, (whole_NK - 8).astype(np.float32) * scale_NK + added_NK

    return form


def torchao_fp8(blocks: tuple[int, int] | None) -> Form:
    """torchao's Float8Tensor; a size of 0 is that of the weight."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        own = None if blocks is None else (blocks[0], blocks[1] or weight_NK.shape[1])
        parts, meant = block_fp8(own)(weight_NK, count)
        return {"_weight_qdata": parts["weight"], "_weight_scale": parts["weight_scale_inv"]}, meant

    return form


def padded_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Write numbers along the last dimension as words of 32 bits; a last one is filled up with zeros."""
    return as_words(np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % (32 // bits)))), bits)
