"""Peculiar families on their way to the engine: what is settled once, and surgery on their layers."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import pytest
import torch

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.families.chameleon.model import adapt as adapt_chameleon
from beheld.families.gemma3n.model import adapt as adapt_gemma3n
from beheld.models.load import model_class_of
from beheld.models.surgery import compiled as fuse
from beheld.models.surgery import joined
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.platform.triton import HAS_TRITON
from tests import tiny
from tests.oracle import cases, reference


def load(family: str) -> Any:
    """The family's tiny model, as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny.checkpoint(family), dtype=torch.float32).eval()


@torch.inference_mode()
def test_chameleons_codes_are_barred_by_a_tensor() -> None:
    model, inputs = load("chameleon"), reference.inputs("chameleon", cases.FOUR)
    before = model(**inputs).logits
    adapt_chameleon(model, Changes())
    codes = model.model.vocabulary_mapping.image_tokens
    assert isinstance(codes, torch.Tensor)
    assert codes.device == model.device
    assert torch.equal(model(**inputs).logits, before)
    assert (before[..., codes] == torch.finfo(before.dtype).min).all()
    # Without the bar they would often win.
    hidden = model.model(**inputs).last_hidden_state
    assert torch.isin(model.lm_head(hidden).argmax(-1), codes).any()


@pytest.mark.parametrize("family", ["chameleon", "gemma3n"])
@torch.inference_mode()
def test_fused_layers_answer_as_before(family: str) -> None:
    model = load(family)
    inputs = reference.inputs(family, cases.FOUR)
    before = model(**inputs).logits
    text = model.config.get_text_config(decoder=True)
    # Layers that read another's cache have neither keys nor values of their own.
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    assert joined.fuse_linears(text_model(model), Changes()) == own + text.num_hidden_layers
    torch.testing.assert_close(model(**inputs).logits, before, atol=5e-5, rtol=1e-4)


def test_an_overridden_architecture_is_loaded_by_its_configuration() -> None:
    """As users of Mantis write it; the class of that name is in no library here."""
    args = EngineArgs(hf_overrides={"architectures": ["MantisForConditionalGeneration"]})
    path = tiny.checkpoint("mantis")
    config = read_config(path, args)
    info = read_info(path, args, config)
    assert info.architecture == "MantisForConditionalGeneration"
    assert model_class_of(info, config).__name__ == "LlavaForConditionalGeneration"


class Kind(torch.nn.Module):
    """A layer of a kind of its own: its number is compiled in."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.number


def test_layers_of_many_kinds_are_all_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    layers = [Kind(number) for number in range(12)]
    fuse.compile_layers(layers, Changes())
    for rows in (1, 5):
        x = torch.ones(rows, 2)
        with fuse.settings():
            assert [float(layer(x)[0, 0]) for layer in layers] == list(range(12))
    assert "could not be compiled" not in caplog.text


class Scaled(torch.nn.Module):
    """A layer that gives an operator a number of its own, as attention is given its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.3
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.leaky_relu(x * self.weight, self.scale)


def test_a_layer_with_a_number_is_traced_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an input that turns out to be none, each start would trace the layer anew, whatever the cache holds."""
    traced, plain = [], torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    # Of its own for each form, as the compiler's options make it one.
    monkeypatch.setattr(torch, "compile", lambda call, **_: plain(call, backend=partial(backend), dynamic=True))
    layers = [Scaled() for _ in range(3)]
    fuse.compile_layers(layers, Changes())
    for rows in (1, 5, 7):
        x = -torch.ones(rows, 4)
        with torch._dynamo.config.patch(specialize_float=False), fuse.settings():
            assert all(torch.allclose(layer(x), 0.3 * x) for layer in layers)
    assert len(traced) == 2
    torch._dynamo.reset()


@torch.inference_mode()
def test_gemma3ns_last_ids_have_the_towers_embeddings() -> None:
    """Marks behind a picture are in every prompt with one; transformers embeds them in its outer forward."""
    model = load("gemma3n")
    seen: list[torch.Tensor] = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    ids = torch.arange(model.config.text_config.vocab_size).unsqueeze(0)
    model(input_ids=ids)
    adapt_gemma3n(model, Changes())
    ours = model.get_input_embeddings()(ids)
    torch.testing.assert_close(ours, seen[0], atol=1e-6, rtol=1e-5)
    text = model.get_input_embeddings().text(ids)
    first = model.config.vision_config.vocab_offset
    assert torch.equal(ours[:, :first], text[:, :first])
    assert (ours[:, first:] - text[:, first:]).abs().amin(-1).max() > 1e-3


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beheld.checkpoint.info.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="need the package timm") as caught:
        read_config(tiny.checkpoint("gemma3n"), EngineArgs())
    assert caught.value.remedy == "Install it: pip install timm"
    assert read_config(tiny.checkpoint("gemma3"), EngineArgs()).model_type == "gemma3"


@pytest.mark.parametrize("family", tiny.TINY)
def test_the_layers_are_found(family: str) -> None:
    """What is compiled on a GPU is looked for here, where there is none."""
    args = EngineArgs.from_keywords({"model": str(tiny.checkpoint(family))})
    config = read_config(tiny.checkpoint(family), args)
    info = read_info(tiny.checkpoint(family), args, config)
    with torch.device("meta"):
        model = model_class_of(info, config)._from_config(config)
    assert len(text_model(model).layers) == info.num_layers


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "pixtral_hf"])
@torch.inference_mode()
def test_towers_whose_hidden_states_are_taken_are_compiled(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers records them by hooks on every part of a layer, and no compiler looks through those."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: plain(call, backend="eager", dynamic=True, fullgraph=True))
    model, inputs = load(family), reference.inputs(family, cases.FOUR)
    before = model(**inputs).logits
    (blocks,) = (stack for stack in model.model.vision_tower.modules() if isinstance(stack, torch.nn.ModuleList))
    calls = [layer.forward for layer in blocks]
    fuse.compile_layers(list(blocks), Changes())
    compiled = [layer.forward for layer in blocks]
    torch.testing.assert_close(model(**inputs).logits, before, atol=1e-5, rtol=1e-4)
    assert [layer.forward for layer in blocks] == compiled != calls, "a layer that cannot be compiled is put back"
    torch._dynamo.reset()


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_a_layer_that_cannot_be_compiled_runs_as_it_came(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is told once, as loudly as was asked for."""
    tried, told = [], []

    def refuse(*_: Any, **__: Any) -> Any:
        tried.append(1)
        raise torch._dynamo.exc.Unsupported("not this one")

    monkeypatch.setattr(torch, "compile", lambda call, **_: refuse)
    monkeypatch.setattr(fuse.logger, "log", lambda level, message, *args: told.append((level, message % args)))
    layers = [Kind(number) for number in range(3)]
    fuse.compile_layers(layers, Changes(), for_many=False, level=level)
    many, one = torch.ones(5, 2), torch.ones(1, 2)
    assert [float(layer(many)[0, 0]) for layer in layers] == [0, 1, 2]
    assert not tried
    assert [float(layer(one)[0, 0]) for layer in layers] == [0, 1, 2]
    assert len(tried) == 1
    assert told == [(level, "Kind could not be compiled and runs as it is: not this one")]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("named", [None, "/of/the/user"])
def test_kernels_stay_in_one_folder(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler names a folder of its own when it first compiles, where a second start does not look."""
    from triton import knobs

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    own = knobs.cache.dir
    if named is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", named)
    fuse.compile_layers([], Changes())
    assert os.environ["TRITON_CACHE_DIR"] == (named or own)
