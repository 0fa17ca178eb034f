"""Messages as bytes and back, without pickle: JSON that names known classes, and raw buffers behind it.

    frame    length of the JSON (8 bytes) | JSON | buffer 0 | buffer 1 | ...
    JSON     {"value": ..., "sizes": [bytes of each buffer]}

Plain JSON values stand for themselves; what JSON lacks is an object with one key that says what it is. Only the classes
in the table below can be named, and they are made by their own constructors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from beheld.core import config, errors, media, outputs, params, plan, request
from beheld.core.errors import BeheldError, ConfigError
from beheld.core.request import FinishReason
from beheld.engine import messages, stats
from beheld.scheduler.draft import SchedulerStats

_LENGTH = struct.Struct("<Q")
_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(config.EngineArgs, config.EngineConfig, config.ModelInfo, config.KVGroup, config.Capacity),
        *(media.MediaItem, media.MediaSpan, media.MediaReceipt),
        *(outputs.TokenEvent, plan.TokenLogprobs),
        *(params.Sampling, params.Grammar),
        *(request.Request, request.LoRARequest),
        *(messages.Submit, messages.Abort, messages.Stop, messages.Ping, messages.ClearCache, messages.Close),
        *(messages.Tokenizer, messages.Events, messages.Pong, messages.Died, messages.Ready, messages.Failed),
        *(stats.EngineStats, SchedulerStats),
    )
}
_ERRORS: dict[str, type[BeheldError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BeheldError)
}
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def encode(value: Any) -> list[bytes | memoryview]:
    """The pieces of a frame's body, to be sent one after the other.

    Raises:
        ConfigError: the value holds something that cannot leave the process, such as a function.
    """
    buffers: list[bytes | memoryview] = []
    made = _plain(value, buffers)
    head = json.dumps({"value": made, "sizes": [len(buffer) for buffer in buffers]}).encode()
    return [_LENGTH.pack(len(head)), head, *buffers]


def decode(body: bytes) -> Any:
    """The value of a frame's body.

    Raises:
        ValueError: it is not one.
    """
    view = memoryview(body)
    try:
        (size,) = _LENGTH.unpack_from(view)
        head = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + size]))
        start = _LENGTH.size + size
        buffers = []
        for length in head["sizes"]:
            if length < 0 or start + length > len(view):
                raise ValueError("a buffer lies outside the frame")
            buffers.append(view[start : start + length])
            start += length
        return _value(head["value"], buffers)
    except (KeyError, IndexError, TypeError, struct.error, RecursionError) as error:
        raise ValueError("the frame is malformed") from error


def _plain(value: Any, buffers: list[bytes | memoryview]) -> Any:
    if isinstance(value, FinishReason):
        return {"finish": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        buffers.append(value)
        return {"bytes": len(buffers) - 1}
    if isinstance(value, list):
        return [_plain(entry, buffers) for entry in value]
    if isinstance(value, tuple | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {kind: [_plain(entry, buffers) for entry in value]}
    if isinstance(value, Mapping):
        return {"map": [[_plain(k, buffers), _plain(v, buffers)] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        return _tensor(value, buffers)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, BeheldError):
        told = [value.reason, value.remedy, value.stage, value.param, value.item]
        return {"error": [type(value).__name__, *told]}
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        own = [_plain(getattr(value, field.name), buffers) for field in fields(value)]
        return {"class": [type(value).__name__, own]}
    raise ConfigError(
        f"A {type(value).__name__} cannot be handed to an engine in another process.",
        "Run the engine in a thread, or leave it out.",
    )


def _tensor(value: torch.Tensor, buffers: list[bytes | memoryview]) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or value.device.type != "cpu":
        raise ConfigError(f"A tensor of {dtype} on {value.device} cannot be handed to an engine in another process.")
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    buffers.append(memoryview(flat.numpy()))  # type: ignore[arg-type]
    return {"tensor": [dtype, list(value.shape), len(buffers) - 1]}


def _value(made: Any, buffers: list[memoryview]) -> Any:
    if isinstance(made, list):
        return [_value(entry, buffers) for entry in made]
    if not isinstance(made, dict):
        return made
    ((kind, inner),) = made.items()
    if kind == "tuple":
        return tuple(_value(entry, buffers) for entry in inner)
    if kind == "set":
        return frozenset(_value(entry, buffers) for entry in inner)
    if kind == "map":
        return {_value(k, buffers): _value(v, buffers) for k, v in inner}
    if kind == "bytes":
        return bytes(buffers[inner])
    if kind == "finish":
        return FinishReason(inner)
    if kind == "tensor":
        dtype, shape, index = inner
        return _to_tensor(dtype, shape, buffers[index])
    if kind == "error":
        name, reason, remedy, stage, param, item = inner
        return _ERRORS[name](reason, remedy, stage=stage, param=param, item=item)
    if kind == "class":
        name, own = inner
        known = _CLASSES[name]
        names = [field.name for field in fields(known)]
        if len(names) != len(own):
            raise ValueError(f"{name} has {len(names)} fields, not {len(own)}")
        return known(**{n: _value(v, buffers) for n, v in zip(names, own, strict=True)})
    raise ValueError(f"there is no {kind!r}")


def _to_tensor(dtype: str, shape: list[int], buffer: memoryview) -> torch.Tensor:
    kind = _DTYPES[dtype]
    count = 1
    for size in shape:
        count *= size
    if min([0, *shape]) < 0 or count * kind.itemsize != len(buffer):
        raise ValueError("a tensor's shape does not fit its buffer")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(buffer), dtype=kind).reshape(shape)
