"""Recurrent states are changed where they lie: a step takes far less memory than a second copy of them."""

from __future__ import annotations

import json
import shutil

import pytest

from beheld import LLM, SamplingParams
from tests import tiny
from tests.memory import peak

_SEQUENCES, _HEADS, _HEAD_DIM = 32, 32, 128
# Of the tiny checkpoint's five.
_LAYERS = 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Qwen3.5's tiny layers with states of the real size."""
    path = tmp_path_factory.mktemp("states") / "model"
    shutil.copytree(tiny.checkpoint("qwen3_5"), path)
    config = json.loads((path / "config.json").read_text())
    sizes = {"linear_num_value_heads": _HEADS, "linear_num_key_heads": _HEADS // 2}
    config["text_config"] |= sizes | {"linear_key_head_dim": _HEAD_DIM, "linear_value_head_dim": _HEAD_DIM}
    assert config["text_config"]["layer_types"].count("linear_attention") == _LAYERS
    (path / "config.json").write_text(json.dumps(config))
    options = {"max_model_len": 256, "max_num_seqs": _SEQUENCES, "kv_cache_memory_bytes": 2**29}
    return LLM(str(path), load_format="dummy", dtype="float32", seed=0, enable_prefix_caching=False, **options)


@pytest.mark.parametrize(("length", "tokens"), [(8, 4), (8, 1)], ids=["decode", "prefill"])
def test_a_step_has_no_second_copy_of_states(length: int, tokens: int, llm: LLM) -> None:
    state_bytes = 4 * _SEQUENCES * _LAYERS * _HEADS * _HEAD_DIM**2
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def answer(first: int) -> None:
        prompts = [
            {"prompt_token_ids": [5 + (first + row + n) % 80 for n in range(length)]} for row in range(_SEQUENCES)
        ]
        llm.generate(prompts, params, use_tqdm=False)

    answer(0)
    with peak() as above:
        answer(1)
    assert above[0] < state_bytes / 2, f"{above[0]} of {state_bytes}"
