"""What cannot be applied exactly is refused by name, with a LoRAError, and the base goes on answering."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld import LLM, LoRARequest, SamplingParams
from beheld.core.errors import LoRAError
from tests import tiny
from tests.lora import adapters
from tests.lora.adapters import Adapter, change
from tests.oracle import cases

GOOD = Adapter("llava", 1)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
DOWN = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
UP = DOWN.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    given = cases.ROOMY | {"enable_lora": True, "max_lora_rank": 8}
    with LLM(str(tiny.checkpoint("llava")), dtype="float32", seed=0, **given) as made:
        yield made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return adapters.write(GOOD, tmp_path_factory.mktemp("lora") / "good")


@pytest.fixture
def folder(saved: str, tmp_path: Path) -> str:
    """A copy of the good one."""
    return str(shutil.copytree(saved, tmp_path / "adapter"))


def with_value(key: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: tensors | {key: value(tensors[key])}


def without(text: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {key: value for key, value in tensors.items() if text not in key}


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]] | None, dict[str, Any], str]] = {
    "rank above the limit": (None, {"r": 16}, r"max_lora_rank.*8.*max_lora_rank=16"),
    "rank of the file": (None, {"r": 3}, "gives rank 3"),
    "rank of a pattern": (None, {"rank_pattern": {"q_proj": 2}}, "gives rank 2"),
    "no rank": (None, {"r": -1}, "no usable r"),
    "no number": (None, {"lora_alpha": "x"}, "no usable r"),
    "alpha of a pattern": (None, {"alpha_pattern": {"q_proj": "x"}}, "unusable pattern"),
    "broken pattern": (None, {"rank_pattern": {"(": 2}}, "unusable pattern"),
    "another type": (None, {"peft_type": "IA3"}, "'IA3'"),
    "dora": (None, {"use_dora": True}, "use_dora"),
    "biases": (None, {"bias": "all"}, "biases"),
    "whole modules": (None, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "a changed base": (None, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "a new field": (None, {"magic": {"a": 1}}, "magic"),
    "nan": (with_value(DOWN, lambda t: t.fill_(float("nan"))), {}, "not finite"),
    "one inf": (with_value(UP, lambda t: t.index_fill(0, torch.tensor([5]), float("inf"))), {}, "not finite"),
    "overflow": (None, {"lora_alpha": 1e41}, "not finite"),
    "integers": (with_value(DOWN, lambda t: t.to(torch.int8)), {}, "int8"),
    "another base": (with_value(DOWN, lambda t: t[:, :32]), {}, "made for another model"),
    "another base's outputs": (with_value(UP, lambda t: t[:32]), {}, "made for another model"),
    "do not fit": (with_value(DOWN, lambda t: t[:3]), {}, "do not fit each other"),
    "a vector": (with_value(DOWN, lambda t: t[0]), {}, "do not fit each other"),
    "more layers": (renamed("layers.2.", "layers.7."), {}, "layers.7"),
    "the tower": (renamed("language_model.layers", "vision_tower.vision_model.encoder.layers"), {}, "vision_tower"),
    "the head": (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, {}, "lm_head"),
    "embeddings": (lambda t: t | {"base_model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, {}, "embedding"),
    "half a pair": (without("layers.1.self_attn.q_proj.lora_B"), {}, "one of the two"),
    "nothing": (lambda t: {}, {}, "holds nothing"),
    "two adapters": (lambda t: t | {UP.replace("B.", "B.b."): t[UP].clone()}, {}, "several"),
    "a layer less": (without("v_proj"), {"target_modules": ["q_proj", "v_proj", "fc1"]}, "'v_proj'"),
    "the same twice": (
        lambda t: t | {k.replace("model.language_model.", "language_model.model."): t[k].clone() for k in (DOWN, UP)},
        {},
        "twice",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_55_what_does_not_fit_is_refused(llm: LLM, folder: str, name: str) -> None:
    tensors, fields, words = BROKEN[name]
    change(folder, tensors, **fields)
    try:
        with pytest.raises(LoRAError, match=words) as caught:
            llm.llm_engine.add_lora(LoRARequest("mine", 7, folder))
        assert "mine" in str(caught.value)
        assert llm.llm_engine.list_loras().isdisjoint({7})
    finally:
        llm.llm_engine.remove_lora(7)


def test_55_places_that_hold_no_adapter(llm: LLM, tmp_path: Path, folder: str) -> None:
    def refused(path: str, words: str) -> None:
        with pytest.raises(LoRAError, match=words):
            llm.generate("x", PARAMS, lora_request=LoRARequest("mine", 8, path), use_tqdm=False)

    refused(str(tmp_path / "nowhere"), "does not exist")
    refused(f"{tmp_path}/../nowhere", "does not exist")
    refused("", "does not exist")
    refused("a\0b", "does not exist")
    refused("https://example.org/adapter", "URL")
    refused("file:///adapter", "URL")
    refused(os.devnull, "does not exist")
    refused(str(tmp_path), r"adapter_config\.json")
    weights = Path(folder) / "adapter_model.safetensors"
    body = weights.read_bytes()
    for part in (b"", body[:-1], body[: len(body) // 2], b"\xff" * 64, body[:8] + b"[" * 4096):
        weights.write_bytes(part)
        refused(folder, "broken")
    weights.unlink()
    refused(folder, r"no readable adapter_model\.safetensors")
    torch.save({"x": torch.ones(1)}, weights.with_suffix(".bin"))
    refused(folder, "pickle")
    weights.write_bytes(body)
    config = Path(folder) / "adapter_config.json"
    for text in ("", "[1]", "{", "[" * 100_000):
        config.write_text(text)
        refused(folder, r"adapter_config\.json")
    config.unlink()
    refused(folder, r"no readable adapter_config\.json")
    assert len(llm.generate("x", PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_file_too_large_to_be_an_adapter_is_not_read(llm: LLM, folder: str) -> None:
    weights = Path(folder) / "adapter_model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(LoRAError, match="larger than any adapter"):
        llm.llm_engine.add_lora(LoRARequest("large", 9, folder))


@pytest.mark.parametrize("fields", [(None, 1, "/a"), ("", 1, "/a"), ("a", 0, "/a"), ("a", True, "/a"), ("a", 1, 5)])
def test_a_request_says_what_an_adapter_is(fields: tuple[Any, Any, Any]) -> None:
    with pytest.raises(LoRAError):
        LoRARequest(*fields)


def test_what_is_no_request_is_refused(llm: LLM) -> None:
    with pytest.raises(LoRAError, match="LoRARequest"):
        llm.generate("x", PARAMS, lora_request="mine", use_tqdm=False)  # type: ignore[arg-type]


def test_one_bad_adapter_does_not_hurt_the_others(llm: LLM, saved: str, tmp_path: Path) -> None:
    loras = [None, LoRARequest("gone", 2, str(tmp_path)), LoRARequest("good", 1, saved)]
    base, bad, good = llm.generate(["x"] * 3, PARAMS, lora_request=loras, on_error="return", use_tqdm=False)
    assert isinstance(bad.error, LoRAError)
    assert base.error is None
    assert good.error is None
    assert list(base.outputs[0].token_ids) != list(good.outputs[0].token_ids)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", "model.language_model."])
def test_names_of_older_versions_are_understood(saved: str, folder: str, prefix: str) -> None:
    from beheld.lora.load import Form, Site, load

    change(folder, renamed("model.language_model.", prefix))
    shapes = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64)}
    shapes |= {"gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}
    sites = {}
    for layer in range(3):
        for name, (inputs, outputs) in shapes.items():
            path = f"layers.{layer}.{'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{name}"
            sites[path] = Site(path, inputs, outputs)
    form = Form(sites, ("model.language_model.", "language_model.model.", "model."), 8, torch.float32)
    made, plain = load("a", folder, form), load("a", saved, form)
    assert made.matrices.keys() == plain.matrices.keys() == sites.keys()
    for name, (down, up) in plain.matrices.items():
        assert torch.equal(made.matrices[name][0], down)
        assert torch.equal(made.matrices[name][1], up)
    assert made.digest != plain.digest
