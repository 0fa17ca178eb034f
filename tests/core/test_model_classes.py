"""What describes a model can be sent to the processes that prepare requests and to the engine's."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from beheld.checkpoint.info import read_info
from beheld.core.config import MODEL_CLASSES, EngineArgs, ModelInfo
from beheld.engine.codec import CODEC as ENGINE
from beheld.inputs.media.tasks import CODEC as MEDIA
from beheld.inputs.prompt.rendering import CODEC as RENDERING
from beheld.wire.codec import Codec
from tests import tiny


def held(hint: Any) -> set[type]:
    """The dataclasses in an annotation."""
    if isinstance(hint, type) and is_dataclass(hint):
        return {hint}
    return {kind for part in typing.get_args(hint) for kind in held(part)}


def test_all_classes_of_a_model_s_description_are_listed() -> None:
    found: set[type] = set()
    left = {EngineArgs, ModelInfo}
    while left:
        kind = left.pop()
        found.add(kind)
        hints = typing.get_type_hints(kind)
        left |= {each for field in fields(kind) for each in held(hints[field.name])} - found
    assert found <= set(MODEL_CLASSES)


@pytest.mark.parametrize("codec", [MEDIA, RENDERING, ENGINE], ids=["media", "rendering", "engine"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "ultravox", "mllama", "lfm2_vl", "deepseek_v2"])
def test_a_description_arrives_as_it_was(codec: Codec, family: str) -> None:
    path = tiny.checkpoint(family)
    args = EngineArgs(str(path))
    info = read_info(path, args)
    for value in (info, args):
        assert codec.decode(bytearray(b"".join(codec.encode(value)))) == value
