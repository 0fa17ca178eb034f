"""Nothing that is computed depends on memory that nobody wrote, or that was given back: all of it holds NaN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.attention import cpu_decode
from beheld.core.plan import StepPlan
from beheld.scheduler.cache.paged import PagedGroup
from tests import tiny
from tests.long import LONG
from tests.oracle import cases
from tests.oracle.test_oracle import request

# One of each way to keep what was computed: full attention; positions of several axes; windows, and masks that look
# ahead; chunks; short convolutions; layers beside the text; readers of other layers' caches; features of several
# layers; experts; an encoder's prompt. The long form has every family in every engine.
FAMILIES = ("llama", "qwen2_vl", "gemma3", "llama4", "lfm2_vl", "mllama", "gemma3n", "qwen3_vl_moe", "florence2")
ENGINES = ("cut", "tight", "overlap")
EACH = [(family, ENGINES[number % 3]) for number, family in enumerate(FAMILIES)]
RUNS = [(family, engine) for family in tiny.TINY for engine in ENGINES if LONG or (family, engine) in EACH]
# No token has these ids, and no counter this value: whoever reads one fails.
NO_TOKEN, NO_COUNT = -(1 << 40), 1 << 30


class Sentinel:
    """Overwrites what an engine has given back, while it runs.

    Attributes:
        filled: how many pieces of memory were overwritten, by kind.
    """

    def __init__(self, llm: LLM) -> None:
        assert llm._run is not None
        core = llm._run.core
        self.filled: Counter[str] = Counter()
        self._groups = [group for group in core.scheduler._cache.groups if isinstance(group, PagedGroup)]
        self._runner: Any = core.executor.runner  # type: ignore[attr-defined]
        self._around(self._runner, "launch", before=self._free_blocks)
        self._around(self._runner, "_sample", after=self._logits)
        self._around(self._runner._adapter, "hidden", after=self._hidden)
        self._around(self._runner.encoder, "forget", before=self._embeddings)
        self._around(self._runner.rows, "release", after=self._row)
        self._around(self._runner.sampler._rows.penalties, "release", after=self._counts)
        dense = self._runner._backend._dense
        self._around(dense, "_first", before=lambda metadata, group: self._copies(dense, metadata.groups.index(group)))

    def _around(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        own = getattr(owner, name)

        def called(*given: Any, **named: Any) -> Any:
            if before is not None:
                before(*given, **named)
            found = own(*given, **named)
            if after is not None:
                after(*given, **named)
            return found

        setattr(owner, name, called)

    def _fill(self, kind: str, tensor: torch.Tensor, value: float = float("nan")) -> None:
        tensor.fill_(value)
        self.filled[kind] += tensor.numel() > 0

    def _free_blocks(self, plan: StepPlan) -> None:
        for group in self._groups:
            free = torch.tensor(group.pool._plain, dtype=torch.long)
            for layer in self._runner.kv.values():
                if layer.group == group.index:
                    for tensor in tensors_of(layer):
                        tensor[free] = float("nan")
            self.filled["blocks"] += len(free)

    def _logits(self, handle: Any, slices: Any, logits_BV: torch.Tensor, *rest: Any) -> None:
        self._fill("logits", logits_BV)

    def _hidden(self, embeds_TH: torch.Tensor, *rest: Any) -> None:
        self._fill("hidden", embeds_TH)

    def _embeddings(self, digests: Any) -> None:
        for digest in digests:
            known = self._runner.encoder.known(digest)
            if known is not None:
                self._fill("embeddings", known)

    def _row(self, row: int) -> None:
        for position in (0, 1):
            self._runner.rows.newest_P[self._runner.rows.newest_places([row], [position])] = NO_TOKEN
        self.filled["rows"] += 1

    def _counts(self, slot: int) -> None:
        table = self._runner.sampler._rows.penalties
        self._fill("counts", table._counts_SV[slot], NO_COUNT)
        self._fill("counts", table._recent_SH[slot], NO_TOKEN)

    def _copies(self, dense: Any, index: int) -> None:
        """The sequences of a group have changed: what was kept dense of the ones before is not read again."""
        for kv, copies in dense._buffers.items():
            if kv.group == index:
                for copy in copies:
                    self._fill("dense copies", copy)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """All that the device holds of a layer."""
    return [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]


@contextmanager
def new_memory(*, filled: bool) -> Iterator[None]:
    """What PyTorch gives out unwritten holds NaN, and the largest of whole numbers, or what happens to be there."""
    known = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = known  # type: ignore[attr-defined]


def params(number: int, max_tokens: int) -> SamplingParams:
    """Greedy, drawn and penalised ones in turn."""
    own: dict[str, Any] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": number, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ][number % 4]
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=1, **own)


def answers(llm: LLM, family: str, asks: tuple[cases.Ask, ...]) -> list[Any]:
    """Tokens and log-probabilities, twice: the second time over what the first has left in the prefix cache."""
    wanted = [params(number, ask.max_tokens) for number, ask in enumerate(asks)]
    given = [request(family, ask) for ask in asks]
    outputs = [output for _ in range(2) for output in llm.generate(given, wanted, use_tqdm=False)]
    return [(tuple(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.mark.parametrize(("family", "engine"), RUNS)
def test_60_memory_that_nobody_wrote_is_never_read(family: str, engine: str) -> None:
    options = cases.tight(family) if engine == "tight" else cases.options(family, engine)
    asks = cases.crowd(family) if engine == "tight" else cases.mixed(family)
    found = []
    for filling in (False, True):
        with (
            new_memory(filled=filling),
            LLM(str(tiny.checkpoint(family)), dtype="float32", seed=0, media_workers=0, **options) as llm,
        ):
            sentinel = Sentinel(llm) if filling else None
            found.append(answers(llm, family, asks))
    assert found[0] == found[1]
    assert sentinel is not None
    assert min(sentinel.filled[kind] for kind in ("blocks", "logits", "hidden", "rows", "counts")) > 0


def test_60_what_reads_unwritten_memory_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory, given-back blocks, rows and embeddings, each read once where it must not be."""
    with new_memory(filled=True):
        assert torch.empty(7).isnan().all()
        assert torch.zeros(3).new_empty(7).isnan().all()
        assert torch.empty_like(torch.zeros(2, 2)).isnan().all()
    # Dense copies are what decoding reads where the call of cpu_decode is not there.
    monkeypatch.setattr(cpu_decode, "attends", lambda *_: False)
    options = cases.options("qwen2_vl", "overlap")
    with LLM(str(tiny.checkpoint("qwen2_vl")), dtype="float32", seed=0, media_workers=0, **options) as llm:
        sentinel = Sentinel(llm)
        answers(llm, "qwen2_vl", (cases.ONE, cases.OTHER, cases.LONG))
        runner, filled = sentinel._runner, sentinel.filled
        assert filled["dense copies"] > 0
        free = sentinel._groups[0].pool._plain[0]
        assert all(t[free].isnan().all() for layer in runner.kv.values() for t in tensors_of(layer))
        assert (runner.rows.newest_P < 0).any()
        kept = next(iter(runner.encoder._embeds.values()))
        with torch.inference_mode():
            runner.encoder.forget(list(runner.encoder._embeds))
        assert kept.isnan().all()
