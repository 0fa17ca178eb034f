"""AutoRound checkpoints, whose weights are packed as GPTQ's or AWQ's, kept or dequantized while loading."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError
from beheld.quant import awq, gptq
from beheld.quant.dequantize import DequantizingMethod
from beheld.quant.gptq import GroupedBits
from beheld.quant.kept_groups import KeptGroups
from beheld.quant.method import StorageTarget

METHOD = "auto-round"
_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_REMEDY = f"Use one packed as {_GPTQ!r} or {_AWQ!r}, or the unquantized checkpoint."
# From this number of bits on, a module is plain.
_PLAIN = 16


def make(stated: Mapping[str, Any], target: StorageTarget) -> DequantizingMethod:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    packing = stated.get("packing_format")
    if packing not in (_GPTQ, _AWQ):
        raise ModelError(f"AutoRound weights packed as {packing!r} are not supported.", _REMEDY)
    if stated.get("data_type", "int") != "int":
        raise ModelError(f"AutoRound weights of the data_type {stated['data_type']!r} are not supported.", _REMEDY)
    # Modules that differ, by name or pattern.
    changes = (stated.get("extra_config") or {}).values()
    forms = [GroupedBits.of(each) for each in ({**stated, **own} for own in changes) if each.get("bits", 0) < _PLAIN]
    forms = list(dict.fromkeys((GroupedBits.of(stated), *forms)))
    words = gptq.words_of(forms, "AutoRound")
    if packing == _GPTQ:
        read = functools.partial(
            gptq.open_weights, forms=forms, zeros_less_one=True, ordered=False, device=target.device
        )
        return DequantizingMethod(METHOD, words, read, KeptGroups(target))
    if any(form.bits != awq.BITS for form in forms):
        raise ModelError(f"Weights packed as {packing!r} have 4 bits; the checkpoint states others.", _REMEDY)
    sizes = [form.group_size for form in forms]
    read = functools.partial(awq.open_weights, group_sizes=sizes, device=target.device)
    return DequantizingMethod(METHOD, words, read, KeptGroups(target))
