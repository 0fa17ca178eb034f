"""Weights rounded to whole numbers and written as compressed-tensors writes them; compressed_integers.py reads them.

    int8   a byte for each number and a scale for each output (`int-quantized`); products round activations to 8 bits
    int4   four bits, and a scale for each group of inputs (`pack-quantized`); activations are not rounded

A weight is whole number * scale. What shares a scale gets the one, of a few below that of its largest weight, whose
squared error is least. With second moments of the layer's inputs, the errors of an input's weights are made up for by
those of the inputs after it (GPTQ, arXiv 2210.17323).

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.quant.compressed_schemes import METHOD
from beheld.quant.grouped import check_greatest
from beheld.quant.integers import packed

# Shares of the scale at which the largest weight is the largest number.
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_LEAST = 1e-30
# Weights that are rounded at a time.
_CHUNK = 1 << 22
# Added to the second moments' diagonal, as a share of its mean; inputs whose errors are spread at a time.
_DAMPING, _BLOCK = 0.01, 128
_WORD = 32


@dataclass(frozen=True)
class WrittenForm:
    """How weights are written.

    Attributes:
        bits: 4 or 8.
        group: inputs that share a scale; None if all of an output's do.
    """

    bits: int
    group: int | None

    @property
    def most(self) -> int:
        """The largest whole number."""
        return (1 << (self.bits - 1)) - 1

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether a weight can be written so."""
        return inputs % (self.group or 1) == 0 and inputs % (_WORD // self.bits) == 0

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of a checkpoint; `ignored` names linear layers that stay as they are."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "mse",
            "observer_kwargs": {},
        }
        activations = None
        if self.group is None:
            activations = weights | {"strategy": "token", "dynamic": True, "observer": None}
        form = "pack-quantized" if self.group else "int-quantized"
        return {
            "quant_method": METHOD,
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations,
                    "output_activations": None,
                    "format": form,
                }
            },
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def entries(self, weight_NK: Tensor, moments_KK: Tensor | None) -> dict[str, Tensor]:
        """Return what is stored of a weight, by the end of the entry's name.

        Args:
            moments_KK: the second moments of the layer's inputs; None to round each weight to the nearest number.

        Raises:
            ModelError: a weight is NaN or infinity, or comes near it.
        """
        check_greatest(weight_NK.abs())
        # float16 does not hold small scales.
        keeps = self.group is not None and weight_NK.dtype == torch.bfloat16
        dtype = torch.bfloat16 if keeps else torch.float32
        if moments_KK is None:
            rows = max(1, _CHUNK // weight_NK.shape[1])
            parts = [self._rounded(each.float(), dtype) for each in weight_NK.split(rows)]
            whole_NK, scale_NG = (torch.cat(each) for each in zip(*parts, strict=True))
        else:
            whole_NK, scale_NG = self._compensated(weight_NK.float(), dtype, moments_KK)
        if self.group is None:
            return {"weight": whole_NK, "weight_scale": scale_NG}
        shape = torch.tensor(weight_NK.shape, dtype=torch.int64)
        # Each number with half of its range added.
        words = packed(whole_NK.to(torch.int64) + (1 << (self.bits - 1)), self.bits)
        return {"weight_packed": words, "weight_scale": scale_NG, "weight_shape": shape}

    def _scales(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scales (..., 1) of weights (..., inputs of one scale), as `dtype` holds them, in float32."""
        largest = weight.abs().amax(-1, keepdim=True).clamp_(min=_LEAST) / self.most
        best = best_error = None
        for share in _SHRUNK:
            scale = (largest * share).to(dtype).float()
            error = (self._near(weight, scale) * scale - weight).square_().sum(-1, keepdim=True)
            if best is None or best_error is None:
                best, best_error = scale, error
            else:
                better = error < best_error
                best, best_error = torch.where(better, scale, best), torch.where(better, error, best_error)
        assert best is not None
        return best

    def _near(self, weight: Tensor, scale: Tensor) -> Tensor:
        return (weight / scale).round_().clamp_(-self.most - 1, self.most)

    def _rounded(self, weight_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return whole numbers in int8, and scales (N, G)."""
        by_group = weight_NK.unflatten(1, (-1, self.group or weight_NK.shape[1]))
        scale = self._scales(by_group, dtype)
        return self._near(by_group, scale).to(torch.int8).flatten(1), scale.squeeze(-1).to(dtype)

    def _compensated(self, weight_NK: Tensor, dtype: torch.dtype, moments_KK: Tensor) -> tuple[Tensor, Tensor]:
        """Return whole numbers and scales, an input after the other; errors go to the inputs that follow."""
        inputs = weight_NK.shape[1]
        left_NK, whole_NK = weight_NK.clone(), torch.empty(weight_NK.shape, dtype=torch.int8)
        # An input that is always zero may have any weight.
        moments_KK = moments_KK.double()
        diagonal_K = moments_KK.diagonal()
        diagonal_K[diagonal_K == 0] = 1.0
        diagonal_K += _DAMPING * diagonal_K.mean()
        inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(moments_KK))
        upper_KK = torch.linalg.cholesky(inverse_KK, upper=True).float()
        scales = []
        scale_N1 = self._scales(weight_NK, dtype) if self.group is None else None
        for start in range(0, inputs, _BLOCK):
            stop = min(start + _BLOCK, inputs)
            errors = []
            for k in range(start, stop):
                if self.group is not None and k % self.group == 0:
                    scale_N1 = self._scales(left_NK[:, k : k + self.group], dtype)
                    scales.append(scale_N1)
                assert scale_N1 is not None
                near_N = self._near(left_NK[:, k], scale_N1[:, 0])
                whole_NK[:, k] = near_N.to(torch.int8)
                error_N = (left_NK[:, k] - near_N * scale_N1[:, 0]) / upper_KK[k, k]
                # Later groups of a block take their scales from what is left of their weights.
                left_NK[:, k + 1 : stop] -= error_N[:, None] * upper_KK[k, k + 1 : stop]
                errors.append(error_N)
            left_NK[:, stop:] -= torch.stack(errors, 1) @ upper_KK[start:stop, stop:]
        scale_NG = torch.cat(scales, 1) if scales else scale_N1
        assert scale_NG is not None
        return whole_NK, scale_NG.to(dtype)


# Sizes of groups, the best first.
GROUPS = (128, 64, 32)


def largest_group(inputs: Sequence[int]) -> int:
    """Return the size of the largest groups that divide the inputs of all layers, or of the most of them."""
    counts: Mapping[int, int] = {size: sum(each % size == 0 for each in inputs) for size in GROUPS}
    return max(GROUPS, key=lambda size: (counts[size], size))


def int4_form(inputs: Sequence[int]) -> WrittenForm:
    """Return the form with such groups; see `largest_group`."""
    return WrittenForm(4, largest_group(inputs))


def int8_form(inputs: Sequence[int]) -> WrittenForm:
    """Return the form with a scale for each output."""
    return WrittenForm(8, None)
