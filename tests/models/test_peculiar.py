"""Peculiar families on their way to the engine: what is settled once, and surgery on their layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.models import families, fuse
from beheld.models.load import model_class_of
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
    families.adapt("chameleon", model)
    codes = model.model.vocabulary_mapping.image_tokens
    assert isinstance(codes, torch.Tensor)
    assert codes.device == model.device
    assert torch.equal(model(**inputs).logits, before)
    assert (before[..., codes] == torch.finfo(before.dtype).min).all()
    # Without the bar they would often win.
    hidden = model.model(**inputs).last_hidden_state
    assert torch.isin(model.lm_head(hidden).argmax(-1), codes).any()


@pytest.mark.parametrize("family", ["chameleon"])
@torch.inference_mode()
def test_fused_layers_answer_as_before(family: str) -> None:
    model = load(family)
    inputs = reference.inputs(family, cases.FOUR)
    before = model(**inputs).logits
    assert fuse.fuse_linears(model) >= 2 * model.config.get_text_config(decoder=True).num_hidden_layers
    torch.testing.assert_close(model(**inputs).logits, before, atol=5e-5, rtol=1e-4)


def test_an_overridden_architecture_is_loaded_by_its_configuration() -> None:
    """As users of Mantis write it; the class of that name is in no library here."""
    args = EngineArgs(hf_overrides={"architectures": ["MantisForConditionalGeneration"]})
    path = tiny.checkpoint("mantis")
    config = read_config(path, args)
    info = read_info(path, args, config)
    assert info.architecture == "MantisForConditionalGeneration"
    assert model_class_of(info, config).__name__ == "LlavaForConditionalGeneration"
