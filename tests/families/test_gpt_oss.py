"""gpt-oss as the language model of InternVL 3.5: images before layers with sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.test_oracle import request

ASKS = (cases.ONE, cases.BETWEEN, cases.SHORT)


def with_gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    """As OpenGVLab/InternVL3_5-GPT-OSS-20B-A4B-Preview-HF, with plain weights."""
    text = {
        "attention_bias": True,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 4096,
        "model_type": "gpt_oss",
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "sliding_window": 24,
        "tie_word_embeddings": False,
        "vocab_size": config["text_config"]["vocab_size"],
    }
    return config | {"text_config": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.reshaped("internvl", tmp_path_factory.mktemp("internvl") / "gpt_oss", with_gpt_oss)


@pytest.mark.parametrize("budget", [512, 24], ids=["whole", "cut"])
def test_images_before_sinks(folder: Path, budget: int) -> None:
    from transformers import AutoModelForImageTextToText, GenerationConfig

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    wanted = [reference.answered(model, reference.inputs("internvl", ask), ask.max_tokens) for ask in ASKS]
    params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=1) for ask in ASKS]
    with LLM(model=str(folder), dtype="float32", max_model_len=512, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate([request("internvl", ask) for ask in ASKS], params, use_tqdm=False)
    for answer, output in zip(wanted, outputs, strict=True):
        got = output.outputs[0]
        assert tuple(output.prompt_token_ids) == answer.prompt_ids
        assert tuple(got.token_ids) == answer.token_ids
        said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
        assert said == pytest.approx(answer.logprobs, abs=1e-4)
