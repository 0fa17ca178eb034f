"""What is read from a checkpoint's configuration, and what of it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import decide
from tests import tiny


def changed(folder: Path, family: str, text: dict[str, Any] | None = None, **top: Any) -> Path:
    """A copy of the tiny checkpoint's settings with changes of config.json, `text` those of its text model."""
    for file in tiny.checkpoint(family).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config", config)
    if text and "rope_scaling" in text:
        inner.pop("rope_parameters", None)
    inner.update(text or {})
    (folder / "config.json").write_text(json.dumps(config | top), encoding="utf-8")
    return folder


def info_of(folder: Path, **options: Any) -> ModelInfo:
    return read_info(folder, EngineArgs(model=str(folder), **options))


@pytest.mark.parametrize(
    ("family", "positions", "rope", "reach"),
    [
        ("llava_next_video", 4096, {"type": "linear", "factor": 2.0}, 8192),
        ("qwen2", 4096, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        # The length beside it is already the stretched one.
        ("qwen2", 16384, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ("qwen2", 4096, {"rope_type": "dynamic", "factor": 4.0}, 4096),
        (
            "llama",
            16384,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
            16384,
        ),
    ],
)
def test_rotary_scaling_counts(tmp_path: Path, family: str, positions: int, rope: dict[str, Any], reach: int) -> None:
    folder = changed(tmp_path, family, {"max_position_embeddings": positions, "rope_scaling": rope})
    info = info_of(folder)
    assert info.max_model_len == reach
    assert decide(EngineArgs(device="cpu", max_model_len=reach), info).max_model_len == reach
    with pytest.raises(ConfigError, match="exceeds"):
        decide(EngineArgs(device="cpu", max_model_len=reach + 1), info)


_PARTS = {
    "config.json": {
        "AutoConfig": "theirs.XConfig",
        "AutoModel": "theirs.X",
        "AutoModelForCausalLM": "theirs.X",
        "AutoModelForImageTextToText": "theirs.X",
        "AutoProcessor": "theirs.XProcessor",
    },
    "preprocessor_config.json": {"AutoImageProcessor": "theirs.XPictures", "AutoProcessor": "theirs.XProcessor"},
    "processor_config.json": {"AutoProcessor": "theirs.XProcessor"},
    "tokenizer_config.json": {"AutoTokenizer": ["theirs.XTokenizer", None]},
}


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
@pytest.mark.parametrize("family", ["llava", "aria"])
def test_a_repositorys_code_stays_alone_where_transformers_has_the_classes(
    tmp_path: Path, family: str, there: bool
) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "repository"
    shutil.copytree(tiny.checkpoint(family), folder)
    for name, auto_map in _PARTS.items():
        file = folder / name
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps(content | {"auto_map": auto_map}), encoding="utf-8")
    if there:
        (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n", encoding="utf-8")
    with LLM(str(folder), dtype="float32", max_model_len=512, max_num_seqs=2, trust_remote_code=True) as llm:
        prompt = {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": tiny.picture(56, 56, 1)}}
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert answer.outputs[0].token_ids
    assert not ran.exists()


def test_a_repositorys_code_is_used_where_it_alone_knows_the_type(tmp_path: Path) -> None:
    folder = changed(
        tmp_path, "qwen2", model_type="peculiar_qwen2", auto_map={"AutoConfig": "configuration_peculiar.PeculiarConfig"}
    )
    code = "from transformers import Qwen2Config as C\n\n\nclass PeculiarConfig(C):\n    model_type='peculiar_qwen2'\n"
    (folder / "configuration_peculiar.py").write_text(code, encoding="utf-8")
    assert info_of(folder, trust_remote_code=True).model_type == "peculiar_qwen2"
    with pytest.raises(ModelError, match="peculiar_qwen2"):
        info_of(folder)


@pytest.mark.parametrize("family", ["deepseek_ocr", "deepseek_vl_v2"])
def test_of_a_shared_model_type_the_class_decides(family: str) -> None:
    folder = tiny.checkpoint(family)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "deepseek_vl_v2"
    assert read_config(folder, EngineArgs(model=str(folder))).model_type == family


def test_common_activations_are_ones_that_transformers_has() -> None:
    """Their names are accepted without asking it."""
    from transformers.activations import ACT2FN

    from beheld.checkpoint.checks.config import _COMMON_ACTIVATIONS

    assert set(ACT2FN) >= _COMMON_ACTIVATIONS


@pytest.mark.parametrize(("kind", "version"), [("granite_docling", "5.23"), ("flint", "5.21"), ("lfm3", "5.23")])
def test_types_of_a_newer_transformers_are_refused_with_its_version(
    tmp_path: Path, kind: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(ModelError, match=f"'{kind}' need transformers {version}: 5.17.0, which is installed"):
        info_of(tmp_path)
