"""The names that scripts import from vllm, and what is said about those that are not there."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import beheld
from beheld.compat import finder
from beheld.compat.names import MODULES
from beheld.core.errors import ConfigError, FetchError, ParamsError

HOMES = [(module, name) for module, names in MODULES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), HOMES, ids=lambda value: value)
def test_every_name_of_the_table_is_there(module: str, name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"from {module} import {name}", space)
    assert space[name] is getattr(importlib.import_module(module), name)


def test_the_imports_of_the_documents() -> None:
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.assets.audio import AudioAsset
    from vllm.assets.image import ImageAsset
    from vllm.assets.video import VideoAsset
    from vllm.inputs import PromptType
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.deepseek_ocr import NGramPerReqLogitsProcessor
    from vllm.multimodal.image import convert_image_mode
    from vllm.multimodal.utils import fetch_image
    from vllm.utils import FlexibleArgumentParser as OldHome
    from vllm.utils.argparse_utils import FlexibleArgumentParser as NewHome

    assert issubclass(LLM, beheld.LLM)
    assert SamplingParams is beheld.SamplingParams
    assert issubclass(EngineArgs, beheld.EngineArgs)
    assert LoRARequest("vision", 1, "path") == beheld.LoRARequest("vision", 1, "path")
    assert OldHome is NewHome
    assert PromptType is importlib.import_module("beheld.inputs.prompt.parse").PromptType
    assert all(map(callable, (AudioAsset, ImageAsset, VideoAsset, NGramPerReqLogitsProcessor)))
    assert all(map(callable, (convert_image_mode, fetch_image)))


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("from vllm import initialize_ray_cluster", ["'vllm.initialize_ray_cluster'", "vllm offers: ", "LLM"]),
        ("import vllm.worker", ["'vllm.worker'"]),
        ("from vllm.utils import cdiv", ["'vllm.utils.cdiv'", "FlexibleArgumentParser"]),
        ("from vllm.inputs import PromtType", ["Did you mean 'PromptType'?"]),
        ("from vllm.multimodal import fetch_image", ["There is vllm.multimodal.utils.fetch_image."]),
        ("from vllm.lora import LoRAConfig", ["'vllm.lora.LoRAConfig'", "vllm.lora.request"]),
        ("import vllm.distributed.parallel_state", ["do not reach into the engine's processes"]),
    ],
)
def test_what_is_absent_is_named_with_what_there_is(statement: str, words: list[str]) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert all(word in str(caught.value) for word in words), caught.value


def test_asking_for_an_attribute_is_answered_as_by_any_module() -> None:
    import vllm

    assert not hasattr(vllm, "initialize_ray_cluster")
    with pytest.raises(AttributeError, match="vllm offers"):
        vllm.initialize_ray_cluster  # noqa: B018
    assert {"LLM", "utils"} <= set(dir(vllm))
    assert vllm.outputs.RequestOutput is beheld.RequestOutput
    space: dict[str, Any] = {}
    exec("from vllm import *", space)
    assert issubclass(space["LLM"], beheld.LLM)


def test_the_real_one_must_not_be_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(ImportError, match="before"):
        finder.install()


def test_the_page_lists_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "vllm-scripts.md").read_text(encoding="utf-8")
    for module, names in MODULES.items():
        if names:
            lines = (line for line in page.splitlines() if line.startswith("|"))
            (row,) = (line for line in lines if f"`{module}`" in line.split("|")[1])
            assert all(name in row for name in names), module


def test_importing_the_aliases_is_cheap() -> None:
    code = (
        "import sys, beheld.compat.vllm as ours\nimport vllm\nfrom vllm import EngineArgs\n"
        "assert ours.EngineArgs is EngineArgs\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_open_port_is_free() -> None:
    from beheld.compat.network import get_open_port

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", get_open_port()))
    for module in ("vllm.utils", "vllm.utils.network_utils"):
        assert MODULES[module]["get_open_port"] == "beheld.compat.network:get_open_port"


def test_older_names_of_grammars_make_the_same_parameters() -> None:
    import pydantic
    from vllm import SamplingParams
    from vllm.sampling_params import GuidedDecodingParams

    class Answer(pydantic.BaseModel):
        size: int

    made = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"], backend="xgrammar"))
    assert made.structured_outputs is not None
    assert (made.structured_outputs.choice, made.guided_decoding) == (["a", "b"], None)
    assert made.clone().structured_outputs is made.structured_outputs
    schema = GuidedDecodingParams.from_optional(json=Answer)
    assert schema.json["properties"]["size"]["type"] == "integer"
    assert GuidedDecodingParams.from_optional() is None
    with pytest.raises(ParamsError, match="older name"):
        SamplingParams(guided_decoding=schema, structured_outputs=schema)
    with pytest.raises(ParamsError, match="structured_outputs"):
        SamplingParams(guided_decoding={"choice": ["a"]})


def test_what_a_script_gave_wrongly_is_caught_by_vllms_name() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=-1)


def test_the_registry_knows_what_runs_and_takes_nothing() -> None:
    from vllm import ModelRegistry

    assert {"LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"} <= ModelRegistry.get_supported_archs()
    with pytest.raises(ConfigError, match="add-a-model"):
        ModelRegistry.register_model("MyModel", "my.module:MyModel")


def test_the_connector_follows_its_rules(tmp_path: Path) -> None:
    import asyncio

    from PIL import Image
    from vllm.multimodal.utils import MediaConnector

    path = tmp_path / "a.png"
    Image.new("RGB", (8, 4), "red").save(path)
    allowed = MediaConnector(allowed_local_media_path=str(tmp_path))
    assert allowed.fetch_image(path.as_uri()).size == (8, 4)
    assert asyncio.run(allowed.fetch_image_async(path.as_uri())).size == (8, 4)
    for refused in (MediaConnector(), MediaConnector(allowed_local_media_path=str(tmp_path / "other"))):
        with pytest.raises(FetchError):
            refused.fetch_image(path.as_uri())
    with pytest.raises(FetchError):
        MediaConnector(allowed_media_domains=["example.org"]).fetch_audio("http://other.example/a.wav")


def test_a_name_that_nothing_has() -> None:
    from vllm.utils import random_uuid

    assert len(random_uuid()) == 32
    assert random_uuid() != random_uuid()


@pytest.mark.parametrize("name", ["StructuredOutputsParams", "GuidedDecodingParams"])
def test_a_grammar_may_come_with_options_of_vllms_backends(name: str) -> None:
    """They are no further grammars."""
    from beheld.compat import grammars
    from beheld.structured.compile import grammar_of

    options: dict[str, Any] = {"disable_any_whitespace": True, "disable_additional_properties": True}
    given = getattr(grammars, name)(json={"type": "integer"}, whitespace_pattern=" ", **options)
    assert grammar_of(given).text == '{"type": "integer"}'
    with pytest.raises(ParamsError, match="exactly one"):
        grammar_of(getattr(grammars, name)(**options))
