"""GGUF files: what their metadata says becomes a checkpoint's other files, and broken ones are refused at once."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from beheld.checkpoint.gguf import header
from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, resolve, resolve_tokenizer
from beheld.checkpoint.validate import validate
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.errors import BeheldError, ConfigError, ModelError
from beheld.engine.setup import describe
from tests import tiny, tiny_gguf, tiny_text

TEXTS = (
    *tiny_text.CORPUS,
    "Hello  world,   12345 and 6.7!\n\n\tdon't WE'RE   ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "naïve café ∞ 漢字 \U0001f600 ﬁ",
    "x",
    "",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(file: Path, **options: Any) -> Path:
    """What a start does before the weights."""
    args = EngineArgs(model=str(file), **options)
    folder = resolve(args)
    validate(folder, args)
    read_info(folder, args)
    fetch_weights(args, folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tokenizer_and_template_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source = tiny.checkpoint(name)
    folder = folder_of(tiny_gguf.write(source, tmp_path / "a.gguf"))
    found, meant = (AutoTokenizer.from_pretrained(path) for path in (folder, source))
    for text in TEXTS:
        for special in (True, False):
            ids = meant(text, add_special_tokens=special).input_ids
            assert found(text, add_special_tokens=special).input_ids == ids, text
            assert found.decode(ids) == meant.decode(ids)
            assert found.decode(ids, skip_special_tokens=True) == meant.decode(ids, skip_special_tokens=True)
    turns = [{"role": "user", "content": "What is it?"}]
    rendered = [each.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for each in (found, meant)]
    assert rendered[0] == rendered[1]
    assert found.eos_token_id == meant.eos_token_id
    assert found.bos_token == meant.bos_token or name == "qwen2"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_configuration_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source = tiny_gguf.qwen3(tmp_path / "source") if name == "qwen3" else tiny.checkpoint(name)
    file = tiny_gguf.write(source, tmp_path / "a.gguf", Kind.BF16)
    infos = []
    for path in (source, folder_of(file)):
        args = EngineArgs(model=str(path))
        config = read_config(path, args)
        infos.append((read_info(path, args, config), config))
    (meant, meant_config), (found, found_config) = infos
    assert found.checkpoint_dtype == "bfloat16"
    for field in ("architecture", "family", "vocab_size", "hidden_size", "num_layers", "max_model_len", "kv_groups"):
        assert getattr(found, field) == getattr(meant, field), field
    assert found.eos_ids >= meant.eos_ids
    for field in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "intermediate_size", "head_dim"):
        assert getattr(found_config, field, None) == pytest.approx(getattr(meant_config, field, None)) or (
            field == "head_dim" and name == "qwen2"
        ), field


def test_the_further_ends_of_an_answer_are_control_tokens(tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf")
    said = json.loads((folder_of(file) / "generation_config.json").read_text())
    assert said == {"eos_token_id": [416, 418]}


def rope(**entries: Any) -> tiny_gguf.Edit:
    return lambda said, arrays: said.update({f"llama.rope.{k.replace('__', '.')}": v for k, v in entries.items()})


def test_positions_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=llama3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = 500000.0 ** -(torch.arange(0, 64, 2) / 64) / scaled
    assert factors[0] == 1
    assert float(factors[-1]) == pytest.approx(32)

    def frequencies(said: dict[str, Any], arrays: dict[str, Any]) -> None:
        said |= {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64, "llama.attention.value_length": 64}
        arrays["rope_freqs.weight"] = factors.float().numpy()

    def bent(said: dict[str, Any], arrays: dict[str, Any]) -> None:
        frequencies(said, arrays)
        arrays["rope_freqs.weight"] = arrays["rope_freqs.weight"] * np.linspace(1, 1.1, 32, dtype=np.float32)

    source = tiny.checkpoint("llama")

    def said(edit: tiny_gguf.Edit, name: str) -> Any:
        folder = resolve(EngineArgs(model=str(tiny_gguf.write(source, tmp_path / name, edit=edit))))
        return json.loads((folder / "config.json").read_text())["rope_parameters"]

    assert said(frequencies, "llama3.gguf") == llama3 | {"factor": pytest.approx(32.0)}
    yarn = rope(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=512)
    assert said(yarn, "yarn.gguf") == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert said(rope(scaling__type="linear", scaling__factor=2.0), "linear.gguf") == linear
    with pytest.raises(ModelError, match=r"is not the scale of Llama 3\.1"):
        said(bent, "bent.gguf")
    with pytest.raises(ModelError, match="positions are scaled in a way"):
        said(rope(scaling__type="longrope", scaling__factor=2.0), "long.gguf")
    with pytest.raises(ModelError, match="attn_factor"):
        said(rope(scaling__type="linear", scaling__factor=2.0, scaling__attn_factor=2.0), "attn.gguf")


def test_a_file_is_described_once_until_it_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = tiny.checkpoint("qwen2"), tmp_path / "a.gguf"
    first = folder_of(tiny_gguf.write(source, file))
    assert folder_of(file) == first
    assert len(list(cache.iterdir())) == 1
    tiny_gguf.write(source, file, edit=lambda said, arrays: said.update({"qwen2.context_length": 77}))
    second = folder_of(file)
    assert second != first
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 77
    # A cache that cannot be written is no reason to fail.
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(file / "below"))
    assert (folder_of(file) / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()


def entries(**changes: Any) -> tiny_gguf.Edit:
    """Set entries (a__b is a.b); None removes one."""

    def edit(said: dict[str, Any], arrays: dict[str, Any]) -> None:
        for name, value in changes.items():
            key = name.replace("__", ".")
            said.pop(key, None)
            if value is not None:
                said[key] = value

    return edit


def with_array(name: str, array: Any) -> tiny_gguf.Edit:
    return lambda said, arrays: arrays.update({name: array})


REFUSED: dict[str, tuple[tiny_gguf.Edit, str]] = {
    "unknown architecture": (
        entries(general__architecture="falcon"),
        "architecture 'falcon'; GGUF files of gemma3, llama, phi3",
    ),
    "vision part": (entries(general__type="mmproj"), "mmproj file.*language model's own GGUF file"),
    "vision part of old": (entries(general__architecture="clip"), "mmproj file"),
    "adapter": (entries(general__type="adapter"), "is not a model, but of the type 'adapter'"),
    "one of several": (entries(split__count=3), "one of 3 files.*llama-gguf-split --merge"),
    "no tokenizer": (entries(tokenizer__ggml__model=None), "has no tokenizer.*tokenizer='FOLDER'"),
    "no tokens": (entries(tokenizer__ggml__tokens=None), "has no tokenizer"),
    "no merges": (entries(tokenizer__ggml__merges=None), "merges is no list of texts"),
    "merges of nothing": (entries(tokenizer__ggml__merges=["never seen"]), "tokenizer cannot be built"),
    "merges of three": (entries(tokenizer__ggml__merges=["a b c"]), "'a b c' is not two tokens"),
    "unknown words": (entries(tokenizer__ggml__pre="martian"), "cuts text into words as 'martian'"),
    "no words": (entries(tokenizer__ggml__pre=None), "does not say how text is cut"),
    "other tokenizer": (entries(tokenizer__ggml__model="rwkv"), "of the kind 'rwkv'"),
    "id beyond": (entries(tokenizer__ggml__eos_token_id=99999), "eos_token_id is 99999"),
    "types": (entries(tokenizer__ggml__token_type=[1, 2]), "do not all have a type"),
    "twice": (entries(tokenizer__ggml__tokens=["a", "a"], tokenizer__ggml__token_type=[1, 1]), "occur twice"),
    "too many": (entries(tokenizer__ggml__tokens=[str(n) for n in range(600)]), "has 600 tokens, and the model 512"),
    "no size": (entries(qwen2__embedding_length=None), "qwen2.embedding_length is missing"),
    "size of none": (entries(qwen2__attention__head_count=0), "head_count is 0"),
    "sizes by layer": (entries(qwen2__attention__head_count_kv=[2, 1, 2]), r"head_count_kv is \[2, 1, 2\]"),
    "experts": (entries(qwen2__expert_count=8), "expert_count is 8"),
    "window": (entries(qwen2__attention__sliding_window=64), "sliding_window is 64"),
    "part of a head": (entries(qwen2__rope__dimension_count=8), "cannot be run here"),
    "strange weights": (with_array("blk.0.ssm_a", np.zeros(4, np.float32)), "no qwen2 model has.*'blk.0.ssm_a'"),
    "undequantized": (
        with_array("blk.0.attn_norm.weight", np.zeros(64, np.int32)),
        "is of the type I32, which cannot be dequantized",
    ),
    "epsilon": (entries(qwen2__attention__layer_norm_rms_epsilon=7.0), "rms_norm_eps is 7.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    edit, words = REFUSED[case]
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf", edit=edit)
    begin = time.perf_counter()
    with pytest.raises(BeheldError, match=words) as caught:
        describe(EngineArgs(model=str(file), device="cpu"))
    assert caught.value.remedy
    assert time.perf_counter() - begin < 5  # a second where the machine is idle


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size] if size > 0 else data[: len(data) + size]


def number(place: int, value: int, code: str = "<Q") -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + struct.pack(code, value) + data[place + struct.calcsize(code) :]


def kind_of_first(value: int) -> Callable[[bytes], bytes]:
    """Another type of the first tensor: after its name, two dimensions and their sizes."""

    def damage(data: bytes) -> bytes:
        place = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
        return number(place, value, "<I")(data)

    return damage


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "too short"),
    "first bytes": (cut(20), "too short"),
    "other magic": (lambda data: b"GGML" + data[4:], "does not begin as a GGUF"),
    "within metadata": (cut(300), "ends within its header"),
    "within tokens": (cut(4000), "ends within its header"),
    "within weights": (cut(-1000), "cut short: [0-9]+ of its"),
    "old version": (number(4, 1, "<I"), "its version is 1"),
    "big-endian": (number(4, 3 << 24, "<I"), "big-endian"),
    "many tensors": (number(8, 1 << 60), "claims"),
    "many entries": (number(16, 1 << 60), "claims"),
    "more tensors": (number(8, 60000), "(ends within|dimensions|claims|UTF-8)"),
    "long name": (number(24, 1 << 62), "ends within its header"),
    "unknown type": (kind_of_first(999), "type 999, which the package gguf does not know"),
    "removed type": (kind_of_first(4), "type 4, which"),
    "wider type": (kind_of_first(28), "type F64, which cannot be dequantized"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_broken_file_is_refused_at_once(case: str, tmp_path: Path) -> None:
    damage, words = DAMAGED[case]
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf")
    file.write_bytes(damage(file.read_bytes()))
    begin = time.perf_counter()
    with pytest.raises(ModelError, match=words) as caught:
        folder_of(file)
    assert "a.gguf" in caught.value.reason
    assert caught.value.remedy
    assert time.perf_counter() - begin < 5


def test_any_byte_of_the_header_may_be_wrong(tmp_path: Path) -> None:
    """Nothing but a ModelError comes of it."""
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf")
    data = file.read_bytes()
    chance = np.random.default_rng(0)
    end = data.index(b"output_norm.weight") + 60
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        for place in chance.integers(0, end, 3):
            broken[place] = chance.integers(0, 256)
        file.write_bytes(broken)
        try:
            header.read_header(file)
        except ModelError:
            refused += 1
    assert refused > 20


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf")
    monkeypatch.setattr(header, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"need the package gguf.*pip install gguf"):
        folder_of(file)


def test_another_tokenizer_takes_the_place_of_one_that_is_missing(tmp_path: Path) -> None:
    source = tiny.checkpoint("qwen2")
    file = tiny_gguf.write(source, tmp_path / "a.gguf", edit=entries(tokenizer__ggml__model=None))
    folder = folder_of(file, tokenizer=str(source))
    assert resolve_tokenizer(EngineArgs(model=str(file), tokenizer=str(source)), folder) == source
    assert not (folder / "tokenizer.json").exists()
    folder_of(file, skip_tokenizer_init=True)


def test_names_that_are_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no file"):
        folder_of(tmp_path / "none.gguf")
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(ModelError, match=r"is a file.*Give a GGUF file"):
        folder_of(tmp_path / "some.txt")
    # The suffix is not needed.
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.bin")
    assert (folder_of(file) / "tokenizer.json").is_file()


def test_only_methods_for_its_weights_are_taken(tmp_path: Path) -> None:
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf")
    folder_of(file, quantization="gguf")
    folder_of(file, quantization="int8")
    with pytest.raises(ConfigError, match="quantized by 'gguf'"):
        folder_of(file, quantization="compressed-tensors")


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.checkpoint("llama")
    file = tiny_gguf.write(source, tmp_path / "a.gguf", Kind.Q8_0)
    plans = []
    for path in (source, file):
        assert main(["plan", str(path), "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out)["model"])
    assert plans[0]["parameters"] == plans[1]["parameters"]
    assert plans[0]["kv_bytes_per_token"] > 0
    assert plans[1]["architecture"] == "LlamaForCausalLM"
