"""A checkpoint that a script saves in parts gives the same answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from beheld.checkpoint.weights import weight_files
from beheld.compat.llm import ScriptLLM
from beheld.compat.parts import ShardedStateLoader, save
from beheld.core.errors import ConfigError, ModelError
from beheld.core.params import SamplingParams
from tests import tiny


def answer(llm: ScriptLLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return llm.generate("A cat sat", params, use_tqdm=False)[0].outputs[0].token_ids


def test_parts_are_read_as_the_whole(tmp_path: Path) -> None:
    source = tiny.checkpoint("llama")
    with ScriptLLM(str(source), dtype="float32", max_model_len=64) as llm:
        expected = answer(llm)
        core = llm.llm_engine.engine_core
        core.save_sharded_state(path=str(tmp_path), pattern=ShardedStateLoader.DEFAULT_PATTERN, max_size=20_000)
        for pattern in ("weights-{part}", "model-rank-{rank}-part-0", "model-rank-{rank}-part-{part}-{other}"):
            with pytest.raises(ConfigError, match="not found when they are loaded"):
                core.save_sharded_state(str(tmp_path / "other"), f"{pattern}.safetensors")
        # Fewer parts than before would leave some of the old ones.
        with pytest.raises(ConfigError, match="holds parts already"):
            core.save_sharded_state(str(tmp_path))
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    # Scripts copy the index of the checkpoint too.
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(weight_files(tmp_path)) > 2
    with ScriptLLM(str(tmp_path), dtype="float32", max_model_len=64, load_format="sharded_state") as llm:
        assert answer(llm) == expected
    save(tmp_path, tmp_path / "again")
    assert weight_files(tmp_path / "again") == ("model-rank-0-part-0.safetensors",)


def test_weights_are_read_later() -> None:
    options = {"dtype": "float32", "max_model_len": 64}
    with ScriptLLM(str(tiny.checkpoint("llama")), **options) as whole:
        expected = answer(whole)
    with ScriptLLM(str(tiny.checkpoint("llama")), load_format="dummy", **options) as llm:
        assert answer(llm) != expected
        engine = llm.llm_engine
        llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        llm.collective_rpc("reload_weights")
        assert answer(llm) == expected
        assert llm.llm_engine is not engine
        for args in (({"load_config": {"load_format": "auto", "x": 1}},), ({"model_config": {}},), ()):
            with pytest.raises(ConfigError, match="is not available here"):
                llm.collective_rpc("update_config", args=args)
        with pytest.raises(ConfigError, match="apply_model"):
            llm.apply_model(str)


def test_parts_of_several_ranks_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"model-rank-{rank}-part-0.safetensors").touch()
    with pytest.raises(ModelError, match="several ranks of another engine"):
        weight_files(tmp_path)
    with pytest.raises(ModelError, match="no safetensors"):
        save(tmp_path / "nothing", tmp_path / "new")
