"""Embeddings of audio: each is as its tower makes it alone, whatever else shares the call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from beheld.core.plan import EncodeItem
from beheld.families import registry
from beheld.families.phi4_multimodal.model import adapt as adapt_phi4
from beheld.inputs.pipeline import RequestOrder
from beheld.models.hf import HFAdapter
from beheld.models.surgery.operation import Changes, Surgery, Target
from tests import tiny
from tests.fakes import fake_config
from tests.inputs import pipes
from tests.oracle import reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import request

SECONDS = (0.5, 0.93, 0.1, 0.5, 1.4)


def items_of(family: str, ask: Ask) -> list[EncodeItem]:
    """What a request gives the towers."""
    spans = pipes.shared(family).prepare(RequestOrder(request(family, ask), pipes.ONE_TOKEN, request_id="0")).spans
    return [EncodeItem(s.item.digest, s.item.modality, s.item.features, s.item.num_embeds) for s in spans]


def adapt(family: str, model: Any) -> None:
    """What the engine does to the family's model once it is loaded."""
    own = registry.model(family).adapt
    if own is not None:
        own(model, Changes())


def merged(family: str, ask: Ask) -> torch.Tensor:
    """The embeddings that transformers itself puts into the places of sounds: (places, hidden)."""
    model, inputs = reference.model(family), reference.inputs(family, ask)
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["inputs_embeds"] if "inputs_embeds" in kwargs else args[0])

    first = model.model.language_model if hasattr(model.model, "language_model") else model.model.layers[0]
    handle = first.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        model(**inputs)
    handle.remove()
    return seen[0][0, inputs["input_ids"][0] == reference.sound_token(family)]


@pytest.mark.parametrize("family", ["gemma3n", "phi4_mm"])
def test_each_sound_is_heard_as_if_it_were_alone(family: str) -> None:
    alone = [Ask("{a}", sounds=((seconds, 80 + n),)) for n, seconds in enumerate(SECONDS)]
    together = Ask("{a}" * len(alone), sounds=tuple(ask.sounds[0] for ask in alone))
    theirs = [merged(family, ask) for ask in alone]
    # Were they padded to the longest of the prompt, as transformers' processor does, they would be others.
    assert (merged(family, together) - torch.cat(theirs)).abs().max() > 1e-3
    model = type(reference.model(family)).from_pretrained(tiny.checkpoint(family), dtype=torch.float32).eval()
    info = pipes.info(family)
    adapt(info.family, model)
    with torch.inference_mode():
        ours = HFAdapter(Surgery(Target(model, fake_config())), info).encode(items_of(family, together))
    for made, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(made, expected, atol=2e-5, rtol=1e-4)


def test_phi4_projects_sounds_otherwise_beside_pictures() -> None:
    family = "phi4_mm"
    alone = Ask("{a}What?", sounds=((0.5, 90),))
    beside = replace(alone, content="{i}" + alone.content, images=((84, 56, 91),))
    theirs = [merged(family, ask) for ask in (alone, beside)]
    assert (theirs[0] - theirs[1]).abs().max() > 1e-2
    model = type(reference.model(family)).from_pretrained(tiny.checkpoint(family), dtype=torch.float32).eval()
    info = pipes.info(family)
    adapt(info.family, model)
    items = [items_of(family, ask)[-1] for ask in (alone, beside, alone)]
    assert items[0].digest == items[2].digest != items[1].digest
    with torch.inference_mode():
        ours = HFAdapter(Surgery(Target(model, fake_config())), info).encode(items)
    for made, expected in zip(ours, (*theirs, theirs[0]), strict=True):
        torch.testing.assert_close(made, expected, atol=2e-5, rtol=1e-4)


def test_phi4_hears_several_sounds_that_are_longer_than_its_window() -> None:
    """transformers' tower takes one of them at a time."""
    family = "phi4_mm"
    alone = [Ask("{a}", sounds=((40.5, seed),)) for seed in (92, 93)]
    model = type(reference.model(family)).from_pretrained(tiny.checkpoint(family), dtype=torch.float32).eval()
    info = pipes.info(family)
    adapt(info.family, model)
    items = [items_of(family, ask)[0] for ask in alone]
    with torch.inference_mode():
        ours = HFAdapter(Surgery(Target(model, fake_config())), info).encode(items)
    for made, ask in zip(ours, alone, strict=True):
        torch.testing.assert_close(made, merged(family, ask), atol=2e-5, rtol=1e-4)


def test_phi4_does_not_write_down_all_pairs_of_a_long_sound() -> None:
    model = type(reference.model("phi4_mm")).from_pretrained(tiny.checkpoint("phi4_mm"), dtype=torch.float32).eval()
    tower = model.model.embed_tokens_extend.audio_embed.encoder
    sizes = (7, 2, tower.config.chunk_size, tower.config.left_chunk)
    theirs = tower._streaming_mask(*sizes)
    frames = torch.randn(1, 4100, 80, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        heard = tower(frames, None)
        adapt_phi4(model, Changes())
        assert torch.equal(tower(frames, None), heard)
    assert torch.equal(tower._streaming_mask(*sizes), theirs)
    assert tower._streaming_mask(45000, 1, *sizes[2:]).untyped_storage().nbytes() == 1
    # What has chunks keeps them.
    chunked = type(reference.model("phi4_mm")).from_pretrained(tiny.checkpoint("phi4_mm"), dtype=torch.float32)
    tower = chunked.model.embed_tokens_extend.audio_embed.encoder
    tower.config.chunk_size = 3
    adapt_phi4(chunked, Changes())
    assert not tower._streaming_mask(20, 1, 3, 1).all()
