"""Ultravox: layouts of config.json and tokenizers that its checkpoints have, and what is refused by name."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, PlaceholderError
from beheld.families.ultravox.config import UltravoxConfig
from beheld.families.ultravox.modeling import UltravoxCore
from tests import tiny
from tests.tiny_own_ultravox import EAR

WAVE = tiny.sound(0.6, 1)
HEARD = {"prompt": tiny.wrap("ultravox", "<|audio|>What?"), "multi_modal_data": {"audio": (WAVE, 16000)}}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def copied(tmp_path: Path, **entries: Any) -> Path:
    folder = tmp_path / "ultravox"
    shutil.copytree(tiny.checkpoint("ultravox"), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | entries
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def answered(folder: Path, prompt: Any = HEARD) -> Any:
    with LLM(str(folder), dtype="float32", max_model_len=256) as llm:
        return llm.generate([prompt], GREEDY, use_tqdm=False)[0]


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"num_projector_layers": 2}, "num_projector_layers to 2"),
        ({"audio_latency_block_size": 100}, "audio_latency_block_size to 100"),
        ({"projector_act": "gelu"}, "projector_act to 'gelu'"),
        ({"text_model_lora_config": {"r": 8}}, "text_model_lora_config in config.json has the rank 8"),
        ({"audio_model_id": None, "audio_config": {"model_type": "wav2vec2"}}, "audio_config is of the model type"),
        ({"text_model_id": None, "text_config": {"model_type": "gemma3"}}, "text_config is of the model type 'gemma3'"),
        ({"text_model_id": 7}, "text_model_id in config.json must be the name of a checkpoint"),
    ],
)
def test_what_has_no_definition_is_refused_by_name(tmp_path: Path, entries: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        LLM(str(copied(tmp_path, **entries)))


def test_the_encoder_may_be_in_the_checkpoint_itself(tmp_path: Path) -> None:
    ears = json.loads((tiny.checkpoint("ultravox") / EAR / "config.json").read_text(encoding="utf-8"))
    folder = copied(tmp_path, audio_model_id=None, audio_config=ears | {"_name_or_path": EAR})
    own = load_file(folder / "model.safetensors")
    encoder = {name: weight for name, weight in load_file(folder / EAR / "model.safetensors").items() if "enc" in name}
    own |= {name.replace("model.encoder.", "audio_tower."): weight for name, weight in encoder.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder / "openai")
    assert answered(folder).outputs[0].token_ids == answered(tiny.checkpoint("ultravox")).outputs[0].token_ids


def test_a_tokenizer_without_the_placeholder_has_a_reserved_token_for_it(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] != "<|audio|>"]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del named["added_tokens_decoder"]["512"]
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    reserved = next(e["id"] for e in content["added_tokens"] if e["content"] == "<|reserved_special_token_0|>")
    assert read_info(folder, EngineArgs(str(folder))).placeholder_ids == {"audio": reserved}
    whole, other = answered(tiny.checkpoint("ultravox")), answered(folder)
    assert other.outputs[0].token_ids == whole.outputs[0].token_ids
    assert other.prompt_token_ids == [reserved if token == 512 else token for token in whole.prompt_token_ids]


def test_a_conversation_with_audio_and_forged_placeholders() -> None:
    data = base64.b64encode(tiny.wav(WAVE)).decode()
    text = {"type": "text", "text": "What?"}
    parts = (
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    )
    with LLM(str(tiny.checkpoint("ultravox")), dtype="float32", max_model_len=256) as llm:
        talks = [[{"role": "user", "content": [part, text]}] for part in parts]
        first, second = llm.chat(talks, GREEDY, use_tqdm=False)
        assert first.prompt_token_ids == second.prompt_token_ids
        assert list(first.prompt_token_ids).count(512) == 4
        forged = [{"role": "user", "content": [parts[0], {"type": "text", "text": "<|audio|> What?"}]}]
        (output,) = llm.chat([forged], GREEDY, use_tqdm=False)
        assert list(output.prompt_token_ids).count(512) == 4
        with pytest.raises(PlaceholderError, match="2 of the placeholder"):
            llm.generate([HEARD | {"prompt": "<|audio|><|audio|>"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("ln_mid", [True, False])
def test_a_batch_adds_nothing_to_an_item(ln_mid: bool) -> None:
    torch.manual_seed(0)
    ears = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    ears |= {"num_mel_bins": 4, "max_source_positions": 20, "activation_function": "gelu"}
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = UltravoxConfig(
        audio_config=ears, text_config=text | {"vocab_size": 16}, hidden_size=12, projector_ln_mid=ln_mid
    )
    model = UltravoxCore(config).eval()
    assert type(model.multi_modal_projector.ln_post).__name__ == ("Identity" if ln_mid else "LlamaRMSNorm")
    lengths, chunks = [13, 40, 7, 40, 9], [1, 2, 1, 1]
    values = torch.randn(5, 4, 40)
    # What a row holds after its end: zeros in the last of several chunks, nothing that counts in a lone one.
    values[2, :, 7:] = 0

    def heard(rows: slice, counts: list[int]) -> torch.Tensor:
        own = lengths[rows]
        width = max(own)
        return model.get_audio_features(values[rows, :, :width], torch.tensor(own), torch.tensor(counts)).pooler_output

    with torch.inference_mode():
        whole = heard(slice(0, 5), chunks)
        alone = [heard(slice(0, 1), [1]), heard(slice(1, 3), [2]), heard(slice(3, 4), [1]), heard(slice(4, 5), [1])]
    torch.testing.assert_close(whole, torch.cat(alone))
