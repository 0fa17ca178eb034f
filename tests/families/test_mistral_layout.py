"""Mistral's own layout (params.json, consolidated.safetensors, tekken.json) answers as transformers' classes do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from beheld import LLM, EngineArgs, SamplingParams
from beheld.checkpoint.resolve import fetch_weights, pull, resolve
from beheld.core.errors import ConfigError, ModelError, TemplateError
from beheld.families.mistral.config import convert
from beheld.families.mistral.model import halved
from tests import tiny, tiny_text
from tests.checkpoint.hubs import Hub

MARKS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
MARKS += ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>")
PARAMS: dict[str, Any] = {
    **{"dim": 64, "n_layers": 2, "head_dim": 24, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5},
    **{"vocab_size": 512, "rope_theta": 1e6, "max_position_embeddings": 2048},
}
TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "num_channels": 3, "image_size": 112, "patch_size": 14, "rope_theta": 10000.0},
    **{"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "adapter_bias": True},
    **{"image_token_id": 7, "image_break_token_id": 8, "image_end_token_id": 9},
}
MERGED = {"adapter_bias": False, "add_pre_mm_projector_layer_norm": True, "mm_projector_id": "patch_merge"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "text": PARAMS | {"sliding_window": 24},
    "pixtral": PARAMS | {"vision_encoder": TOWER},
    "small": PARAMS | {"vision_encoder": TOWER | MERGED | {"max_image_size": 98, "spatial_merge_size": 2}},
}
# transformers' names -> Mistral's, in this order.
NAMES = (
    *(("model.vision_tower.", "vision_encoder."), ("model.language_model.", ""), ("model.multi_modal_projector.", "")),
    *(("model.", ""), ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn", "attention")),
    *(("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv"), ("o_proj", "wo"), ("mlp", "feed_forward")),
    *(("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"), ("input_layernorm", "attention_norm")),
    *(("post_attention_layernorm", "ffn_norm"), ("linear_1", "vision_language_adapter.w_in")),
    ("linear_2", "vision_language_adapter.w_out"),
)


def theirs(name: str, weight: torch.Tensor, params: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """A weight of transformers' as consolidated.safetensors has it: heads rotate pairs of neighbours."""
    whole = name
    if name == "model.multi_modal_projector.norm.weight":
        return "pre_mm_projector_norm.weight", weight
    for ours, other in NAMES:
        name = name.replace(ours, other)
    for letter, entry in (("q", "n_heads"), ("k", "n_kv_heads")):
        if name.endswith(f"attention.w{letter}.weight"):
            heads = TOWER["num_attention_heads"] if "vision_tower" in whole else params[entry]
            weight = torch.stack(weight.unflatten(0, (heads, 2, -1)).unbind(1), 2).flatten(0, 2)
    return name, weight.contiguous()


def lay(folder: Path, params: dict[str, Any], version: str = "v7") -> Any:
    """Write a checkpoint with random weights; returns transformers' model of them."""
    folder.mkdir()
    kind, entries = convert({"params": params, "torch_dtype": "float32"})
    config = AutoConfig.for_model(kind, **entries)
    torch.manual_seed(0)
    model: Any = getattr(transformers, entries["architectures"][0])._from_config(config, dtype=torch.float32).eval()
    tiny._fill(model)
    tiny_text.write_tekken(folder, MARKS, {})
    tekken = json.loads((folder / "tekken.json").read_text(encoding="utf-8"))
    tekken["config"]["version"] = version
    tiny_text.write_json(folder / "tekken.json", tekken)
    tiny_text.write_json(folder / "params.json", params)
    save_file(
        dict(theirs(name, weight, params) for name, weight in model.state_dict().items()),
        folder / "consolidated.safetensors",
    )
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))


def test_pairs_of_neighbours_become_halves() -> None:
    """Scores of rotated queries and keys are the same by either rule."""
    torch.manual_seed(0)
    q_DH, k_DH = torch.randn(8, 5), torch.randn(8, 5)
    x_H, y_H, angles = torch.randn(5), torch.randn(5), torch.tensor([0.3, 1.1, 2.0, 0.7])

    def neighbours(v_D: torch.Tensor, at: int) -> torch.Tensor:
        turned = torch.view_as_complex(v_D.view(-1, 2)) * torch.polar(torch.ones(4), at * angles)
        return torch.view_as_real(turned).flatten()

    def halves(v_D: torch.Tensor, at: int) -> torch.Tensor:
        cos, sin = (at * angles).cos().repeat(2), (at * angles).sin().repeat(2)
        return v_D * cos + torch.cat([-v_D[4:], v_D[:4]]) * sin

    wanted = neighbours(q_DH @ x_H, 3) @ neighbours(k_DH @ y_H, 7)
    found = halves(halved(q_DH, 1) @ x_H, 3) @ halves(halved(k_DH, 1) @ y_H, 7)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    params = LAYOUTS[layout]
    model = lay(tmp_path / "model", params)
    images = [tiny.picture(84, 56, 1), tiny.picture(56, 112, 2)] if "vision_encoder" in params else []
    asked = "What is it, and where does it stand?"
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts, {"type": "text", "text": asked}]},
    ]
    options: dict[str, Any] = dict.fromkeys(("config_format", "tokenizer_mode", "load_format"), "mistral")
    if images:
        options["limit_mm_per_prompt"] = {"image": 2}
    with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=512, max_num_batched_tokens=32, **options) as llm:
        given = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = llm.chat(messages, given, use_tqdm=False)
    text = f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]{'[IMG]' * len(images)}{asked}[/INST]"
    made = resolve(EngineArgs(model=str(tmp_path / "model")))
    reader = AutoProcessor.from_pretrained(made) if images else AutoTokenizer.from_pretrained(made)
    seen = {"images": [images]} if images else {}
    inputs = reader(text=[text], return_tensors="pt", add_special_tokens=False, **seen)
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    # One token each for the marks.
    assert output.prompt_token_ids[:2] == [1, 5]
    with torch.inference_mode():
        answer = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert list(output.outputs[0].token_ids) == answer[0, inputs["input_ids"].shape[1] :].tolist()


def test_towers_and_text_have_one_kind_of_feed_forward_layers(tmp_path: Path) -> None:
    model = lay(tmp_path / "model", LAYOUTS["pixtral"])
    stored = load_file(tmp_path / "model" / "consolidated.safetensors")
    layers = {
        "layers.0": model.model.language_model.layers[0].mlp,
        "vision_encoder.transformer.layers.0": model.model.vision_tower.transformer.layers[0].feed_forward,
    }
    for place, layer in layers.items():
        up, down, gate = (stored[f"{place}.feed_forward.w{number}.weight"] for number in (3, 2, 1))
        x = torch.randn(3, up.shape[1])
        with torch.inference_mode():
            found = layer(x)
        torch.testing.assert_close(found, (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T)


@pytest.mark.parametrize(("window", "theta"), [(None, 1e6), (24, 1e4)])
def test_rotations_that_a_file_does_not_state(window: int | None, theta: float) -> None:
    params = {name: value for name, value in PARAMS.items() if name != "rope_theta"} | {"sliding_window": window}
    _, found = convert({"params": params, "torch_dtype": "float32"})
    assert found["rope_parameters"]["rope_theta"] == theta


def test_an_older_version_has_no_mark_of_a_system_message(tmp_path: Path) -> None:
    lay(tmp_path / "model", PARAMS, "v2")
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"), ("user", "And?")]
    with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=512) as llm:
        messages = [{"role": role, "content": text} for role, text in turns]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(TemplateError, match="old tokenizer is not built"):
            llm.chat(messages, tools=[TOOL], use_tqdm=False)
    assert output.prompt == "<s>[INST]Hi[/INST]Ho</s>[INST]Be brief.\n\nAnd?[/INST]"


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": 'At a "place"',
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
OFFERED = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "look", "description": "At a \\"place\\"", '
    '"parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}][/AVAILABLE_TOOLS]'
)
CALLS = [
    {"id": "abcdefgh1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Köln"}'}},
    {"id": "abcdefgh2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
]
CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "85 degrees"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": "{}"},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "And?"},
]
LISTED = (
    '[TOOL_CALLS][{"name": "look", "arguments": {"at": "Köln"}, "id": "abcdefgh1"}, '
    '{"name": "look", "arguments": {}, "id": "abcdefgh2"}]</s>'
)
# What mistral-common 1.13.1 writes, whose own files of tokenizers give the same tokens, too.
WRITTEN = {
    "v3": f"<s>[INST]Hi[/INST]{LISTED}"
    '[TOOL_RESULTS]{"content": "85 degrees", "call_id": "abcdefgh1"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": {}, "call_id": "abcdefgh2"}[/TOOL_RESULTS]'
    f"Well.</s>{OFFERED}[INST]S\n\nAnd?[/INST]",
    "v7": f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Hi[/INST]{LISTED}"
    "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]85 degrees[/TOOL_RESULTS]"
    f"[TOOL_RESULTS]abcdefgh2[TOOL_CONTENT]{{}}[/TOOL_RESULTS]Well.</s>{OFFERED}[INST]And?[/INST]",
    "v11": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Hi[/INST]"
    '[TOOL_CALLS]look[CALL_ID]abcdefgh1[ARGS]{"at": "Köln"}[TOOL_CALLS]look[CALL_ID]abcdefgh2[ARGS]{}</s>'
    "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]85 degrees[/TOOL_RESULTS]"
    f"[TOOL_RESULTS]abcdefgh2[TOOL_CONTENT]{{}}[/TOOL_RESULTS]Well.</s>{OFFERED}[INST]And?[/INST]",
    "v13": f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{OFFERED}[INST]Hi[/INST]"
    '[TOOL_CALLS]look[ARGS]{"at": "Köln"}[TOOL_CALLS]look[ARGS]{}</s>'
    "[TOOL_RESULTS]85 degrees[/TOOL_RESULTS][TOOL_RESULTS]{}[/TOOL_RESULTS]Well.</s>[INST]And?[/INST]",
}


@pytest.mark.parametrize("version", WRITTEN)
def test_tools_are_written_as_each_version_has_them(tmp_path: Path, version: str) -> None:
    lay(tmp_path / "model", PARAMS, version)
    with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=1024) as llm:
        (output,) = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), tools=[TOOL], use_tqdm=False)
    assert output.prompt == WRITTEN[version]


def test_pieces_are_those_of_sentencepiece(tmp_path: Path) -> None:
    """Each text between marks is encoded as one of its own, and begins with a blank."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    lay(tmp_path / "model", PARAMS)
    model = io.BytesIO()
    marks = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_text.CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=450,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        control_symbols=[*marks, "[/TOOL_RESULTS]"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "model" / "tekken.json").unlink()
    (tmp_path / "model" / "tokenizer.model.v3").write_bytes(model.getvalue())
    pieces = SentencePieceProcessor(model_proto=model.getvalue())
    with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=1024) as llm:
        (output,) = llm.chat(CONVERSATION[5:], SamplingParams(max_tokens=1), use_tqdm=False)
        (plain,) = llm.generate("A small  red circle", SamplingParams(max_tokens=1), use_tqdm=False)
    turn, end = (pieces.piece_to_id(mark) for mark in ("[INST]", "[/INST]"))
    wanted = [pieces.bos_id(), *pieces.encode("Well."), pieces.eos_id(), turn, *pieces.encode("And?"), end]
    assert output.prompt_token_ids == wanted
    assert plain.prompt_token_ids == [pieces.bos_id(), *pieces.encode("A small  red circle")]


def test_a_file_of_2024_names_no_special_tokens(tmp_path: Path) -> None:
    lay(tmp_path / "model", PARAMS, "v3")
    file = tmp_path / "model" / "tekken.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    del stored["special_tokens"]
    stored["config"] |= {"default_num_special_tokens": 20, "default_vocab_size": 20 + len(stored["vocab"])}
    tiny_text.write_json(file, stored)
    with LLM(str(tmp_path / "model"), dtype="float32", max_model_len=512) as llm:
        (output,) = llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == [1, 3, 20 + ord("a"), 4]


def test_another_version_is_named(tmp_path: Path) -> None:
    lay(tmp_path / "model", PARAMS, "v99")
    with pytest.raises(ModelError, match=r"tekken\.json has the version 'v99'.*known are v1, v2"):
        resolve(EngineArgs(model=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe": {"num_experts": 8}}, "has moe, which is not read"),
        ({"yarn": {"factor": 2}}, "has yarn"),
        ({"sliding_window": [24, 48]}, "windows by layer"),
        ({"vision_encoder": TOWER | {"mm_projector_id": "other"}}, "the projector 'other'"),
        ({"vision_encoder": TOWER | {"frames": 2}}, r"vision_encoder\.frames"),
        ({"dim": None}, "no number for dim"),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").touch()
    tiny_text.write_json(tmp_path / "params.json", PARAMS | changes)
    with pytest.raises(ModelError, match=words):
        resolve(EngineArgs(model=str(tmp_path)))


def test_a_layout_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no params\.json"):
        LLM(str(tiny.checkpoint("mistral")), config_format="mistral")
    tiny_text.write_json(tmp_path / "params.json", PARAMS)
    with pytest.raises(ModelError, match=r"holds no consolidated\.safetensors"):
        resolve(EngineArgs(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="config_format"):
        LLM(str(tiny.checkpoint("mistral")), config_format="other")


def test_transformers_layout_by_its_name() -> None:
    """vLLM's words for it; `hf` as load_format was refused."""
    options: dict[str, Any] = dict.fromkeys(("config_format", "tokenizer_mode", "load_format"), "hf")
    with LLM(str(tiny.checkpoint("mistral")), dtype="float32", max_model_len=64, **options) as llm:
        (output,) = llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.outputs[0].token_ids


def test_a_repository_in_this_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    hub.enter(monkeypatch)
    lay(tmp_path / "model", PARAMS)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub.publish("owner/model", {**files, "config.json": {"model_type": "other"}, "model.safetensors": b"others"})
    args = EngineArgs(model="owner/model", config_format="mistral")
    for online in (True, False):
        hub.online = online
        made = resolve(args)
        fetch_weights(args, made)
        assert (made / "model.safetensors").resolve().read_bytes() == files["consolidated.safetensors"]
    assert "model.safetensors" not in hub.fetched
    hub.online = True
    hub.publish("owner/other", {"config.json": {"model_type": "other"}})
    with pytest.raises(ModelError, match=r"has no params\.json"):
        resolve(EngineArgs(model="owner/other", load_format="mistral"))


def test_a_repository_without_config_json_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    hub.enter(monkeypatch)
    lay(tmp_path / "model", PARAMS)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub.publish("owner/model", files)
    # Another program took what Mistral's own cards name.
    hub.lay("owner/model", "params.json", "tekken.json")
    args = EngineArgs(model="owner/model", tokenizer_mode="mistral")
    for online in (True, False):
        hub.online = online
        hub.forget()
        made = resolve(args)
        fetch_weights(args, made)
        assert (made / "model.safetensors").resolve().read_bytes() == files["consolidated.safetensors"]
        assert ("consolidated.safetensors" in hub.fetched) == online
    hub.online = True
    said: list[str] = []
    assert pull(args, said.append) == made
    assert said[-1] == "3 files have the hashes that the hub states."
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(EngineArgs(model="owner/model", config_format="hf"))
