"""Repositories that bring their own code, read as the classes that transformers has for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from beheld.checkpoint.info import read_config
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from tests import tiny
from tests.oracle import cases
from tests.oracle.test_oracle import check, make


def main_branch(native: dict[str, Any]) -> dict[str, Any]:
    """The tiny ERNIE's configuration as the main branch of its repository writes one."""
    text, vision = native["text_config"], native["vision_config"]
    kept = (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "moe_k",
        "moe_num_shared_experts",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "use_bias",
        "vocab_size",
    )
    names = ("image_start", "image_end", "video_start", "video_end", "video")
    return {name: text[name] for name in kept} | {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLMoEConfig"},
        "freq_allocation": 2,
        "im_patch_id": native["image_token_id"],
        "model_type": "ernie4_5_moe_vl",
        "moe_layer_end_index": [29, 28],
        "moe_layer_interval": 1,
        "moe_layer_start_index": [1, 1],
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "rope_theta": 500000,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {name: vision[name] for name in vision if name != "intermediate_size"} | {"mlp_ratio": 2},
        **{f"{name}_token_id": native[f"{name}_token_id"] for name in names},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny ERNIE under the main branch's configuration."""
    target = tmp_path / "ernie"
    shutil.copytree(tiny.checkpoint("ernie4_5_vl_moe"), target)
    native = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(main_branch(native)), encoding="utf-8")
    return target


def test_the_main_branch_of_ernie_is_the_class_that_transformers_has(folder: Path) -> None:
    native = read_config(tiny.checkpoint("ernie4_5_vl_moe"), EngineArgs()).to_dict()
    args = EngineArgs(trust_remote_code=True, hf_overrides={"image_end_token_id": 7})
    found = read_config(folder, args).to_dict()
    assert found.pop("image_end_token_id") == 7
    del native["image_end_token_id"]
    for config in (native, found):
        config.pop("_name_or_path", None)
        # What a part says of itself beside its own settings.
        for name in ("architectures", "dtype"):
            config["text_config"].pop(name)
    assert found == native


def test_a_checkpoint_of_the_main_branch_answers_as_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "checkpoint", lambda family: folder)
    with make("ernie4_5_vl_moe", cases.ROOMY) as llm:
        monkeypatch.undo()
        check(llm, "ernie4_5_vl_moe", cases.fit("ernie4_5_vl_moe", cases.FOUR, cases.VIDEO, cases.SHORT))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"moe_num_experts": [4, 8]}, "differ"), ({"vision_config": None}, "cannot be read"), ({}, "im_patch_id")],
)
def test_a_broken_configuration_is_named(folder: Path, change: dict[str, Any], words: str) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) | change
    if not change:
        del raw["im_patch_id"]
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        read_config(folder, EngineArgs())
    assert words in str(caught.value)
