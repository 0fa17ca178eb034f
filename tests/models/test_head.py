"""The head computes logits from given hidden states by the model's own code, and the layers do not run for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld import LLM, SamplingParams
from beheld.core.errors import ModelError
from beheld.models.head import ModelHead
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import speaker_and_core
from tests import tiny
from tests.oracle import reference

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "media_workers": 0}


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.calls = 0

    def forward(self, inputs_embeds: Tensor, use_cache: bool = True) -> Any:
        self.calls += 1
        return SimpleNamespace(last_hidden_state=self.layers[0](inputs_embeds), router_logits="routed")


class Speaker(nn.Module):
    """Does something to its logits, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Core()
        self.lm_head = nn.Linear(4, 7)
        self.fails = False

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, inputs_embeds: Tensor, use_cache: bool = True) -> Any:
        output = self.model(inputs_embeds=inputs_embeds, use_cache=use_cache)
        if self.fails:
            raise RuntimeError("no memory")
        logits = self.lm_head(output.last_hidden_state).tanh() * 3
        return SimpleNamespace(logits=logits, router_logits=output.router_logits)


@torch.inference_mode()
def test_the_model_computes_logits_of_given_states_without_its_layers() -> None:
    speaker, changes = Speaker(), Changes()
    head = ModelHead(speaker, speaker.model, changes)
    x_TH = torch.randn(5, 4)
    hidden_TH = speaker.model(inputs_embeds=x_TH[None]).last_hidden_state[0]
    assert speaker.model.calls == 1
    wanted_SV = speaker(inputs_embeds=x_TH[None]).logits[0, [3, 1]]
    assert speaker.model.calls == 2
    assert torch.equal(head(hidden_TH[[3, 1]]), wanted_SV)
    assert speaker.model.calls == 2, "the layers ran for the head"
    assert head(hidden_TH[:0]).shape == (0, 7)
    changes.take_back()
    assert "forward" not in vars(speaker.model)


@torch.inference_mode()
def test_after_a_head_that_failed_the_layers_compute_again() -> None:
    speaker = Speaker()
    head = ModelHead(speaker, speaker.model, Changes())
    x_TH = torch.randn(5, 4)
    before = speaker.model(inputs_embeds=x_TH).last_hidden_state
    speaker.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        head(torch.randn(2, 4))
    assert torch.equal(speaker.model(inputs_embeds=x_TH).last_hidden_state, before)


def test_the_core_is_the_part_with_the_layers_and_without_the_head() -> None:
    speaker = Speaker()
    assert speaker_and_core(speaker) == (speaker, speaker.model)
    outer = nn.Module()
    outer.tower, outer.language_model = nn.Linear(2, 2), speaker
    outer.get_decoder = lambda: speaker.model  # type: ignore[assignment]
    outer.get_output_embeddings = speaker.get_output_embeddings  # type: ignore[assignment]
    assert speaker_and_core(outer) == (speaker, speaker.model)
    speaker.get_output_embeddings = lambda: None  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ModelError, match="no head"):
        speaker_and_core(speaker)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_hidden_states_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [5, 17, 99, 42, 7]
    with LLM(str(tiny.checkpoint(family)), **OPTIONS) as llm:
        adapter: Any = llm._run.core.executor.runner._adapter  # type: ignore[union-attr]
        hidden, found = adapter.hidden, []

        def noted(embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
            made: Tensor = hidden(embeds_TH, positions_XT)
            found.append(made.clone())
            return made

        monkeypatch.setattr(adapter, "hidden", noted)
        llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    with torch.inference_mode():
        output = reference.model(family)(input_ids=torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(found[0], output.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
