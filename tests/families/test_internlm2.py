"""InternLM2 in its publisher's layout answers and scores as a Llama of transformers' with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from beheld import LLM, SamplingParams
from beheld.core.errors import ConfigError, ModelError, ParamsError
from tests import tiny, tiny_own_intern, tiny_own_internlm2
from tests.tiny_text import write_json

CONFIG, published = tiny_own_internlm2.CONFIG, tiny_own_internlm2.published

TEXTS = ["What is in this picture?", "A small red circle stands left of a large blue square. " * 4, "Hello"]
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48}


def lay(folder: Path, biased: bool, head: bool) -> tuple[Any, torch.Tensor]:
    """Write a checkpoint with drawn weights; returns transformers' Llama with them, and the row of the head."""
    folder.mkdir()
    tiny_own_intern.write_internlm2_tokenizer(folder, ())
    named = "InternLM2ForRewardModel" if head else "InternLM2ForCausalLM"
    write_json(folder / "config.json", CONFIG | {"architectures": [named], "bias": biased})
    entries = {name: CONFIG[name] for name in CONFIG if name not in ("architectures", "auto_map", "model_type")}
    config = transformers.LlamaConfig(**entries | {"attention_bias": biased, "rope_scaling": None})
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()
    tiny._fill(model)
    row_H = torch.randn(1, CONFIG["hidden_size"])
    weights = published(dict(model.state_dict()))
    if head:
        del weights["output.weight"]
        weights["v_head.weight"] = row_H
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model, row_H


@pytest.mark.parametrize("biased", [False, True])
def test_answers_are_those_of_a_llama(tmp_path: Path, biased: bool) -> None:
    model, _ = lay(tmp_path / "m", biased, head=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path / "m"), **SMALL) as llm:
        for output in llm.generate(TEXTS, params, use_tqdm=False):
            ids = torch.tensor([output.prompt_token_ids])
            with torch.no_grad():
                wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
            assert list(output.outputs[0].token_ids) == wanted[0, ids.shape[1] :].tolist()


def test_a_reward_model_scores_every_position(tmp_path: Path) -> None:
    model, row_H = lay(tmp_path / "m", biased=True, head=True)
    with LLM(str(tmp_path / "m"), runner="pooling", trust_remote_code=True, **SMALL) as llm:
        for output in llm.reward(TEXTS, use_tqdm=False):
            with torch.no_grad():
                states_TH = model.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            torch.testing.assert_close(output.outputs.data, states_TH @ row_H.T, atol=2e-4, rtol=1e-4)
        with pytest.raises(ParamsError, match="it gives scores"):
            llm.classify(TEXTS, use_tqdm=False)
    with pytest.raises(ConfigError, match="generates no text"):
        LLM(str(tmp_path / "m"), runner="generate", **SMALL)


def test_a_head_of_another_shape_is_named(tmp_path: Path) -> None:
    lay(tmp_path / "m", biased=False, head=True)
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file) | {"v_head.weight": torch.zeros(2, 128)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"v_head\.weight has the shape \(2, 128\)"):
        LLM(str(tmp_path / "m"), **SMALL)


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    lay(tmp_path / "m", biased=False, head=False)
    content = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
    write_json(tmp_path / "m" / "config.json", content | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(ModelError, match="'internlm2' has rotary embeddings of the type 'linear'"):
        LLM(str(tmp_path / "m"), **SMALL)
