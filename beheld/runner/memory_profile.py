"""Memory that a step takes in addition to weights and KV cache: measured by running it, else computed or bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.sampling import LogprobsMode, Sampling
from beheld.models.adapter import ModelAdapter
from beheld.models.call_graphs import KEPT_BYTES
from beheld.platform.platform import Platform
from beheld.platform.registry import platform_of
from beheld.runner import graphs, mixed_graphs
from beheld.runner.rank_sampler import RankSampler
from beheld.runner.runner import PROMPT_ROWS, ModelRunner
from beheld.sample.sampler import Sampler

# A tower call is bounded by its embeddings (`encoder_cache.py`), each made of four patches in most families.
_CALL_ROWS = 4 * 4096
# What the driver takes for captured graphs.
_GRAPH_BYTES = 1 << 30
# The sampler at its most expensive: penalties need counts of every token, and a filter by sums needs all logits sorted.
_COSTLY = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=20)
# Other forms of the kernels: logits as the model gives them, and the best token after penalties.
_CHEAPER = (Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=0.0, repetition_penalty=1.1))


@dataclass(frozen=True)
class MemoryProfile:
    """The most bytes that the engine takes in addition to the weights and the cache.

    Attributes:
        text: of the text model in the largest step.
        tower: of a tower call.
        sampling: of choosing a token for every row, the logits included.
        kept: of what stays between steps: embeddings, counts of penalties, the logits of graphs, and the inputs and
            outputs of graphs of tower calls.
        graphs: of the graphs' own pools, for intermediate results of a step and of a tower call.
    """

    text: int
    tower: int
    sampling: int
    kept: int
    graphs: int

    @property
    def reserved_bytes(self) -> int:
        """What the KV cache must leave. Towers, text and sampler follow one another and free what they took."""
        return int(1.1 * (max(self.text, self.tower, self.sampling) + self.graphs)) + self.kept + _GRAPH_BYTES


def fullest_step(config: EngineConfig) -> list[int]:
    """Tokens of each sequence in the step that takes most memory: a full one of the longest sequences."""
    lengths: list[int] = []
    left = config.max_num_batched_tokens
    while left > 0 and len(lengths) < config.max_num_seqs:
        # A sequence's last token is sampled and never computed.
        lengths.append(max(1, min(left, config.max_model_len - 1)))
        left -= lengths[-1]
    return lengths


def measure(
    probe: ModelRunner, adapter: ModelAdapter, info: ModelInfo, config: EngineConfig, *, captures: bool
) -> MemoryProfile:
    """What the largest step takes of a GPU, measured by running it and the sampling of a full batch on `probe`.

    A tower is not run: it would be compiled now, for sizes that may never come. The bound assumes that its rows cost as
    much as the text model's, which is wider in every known family.

    Args:
        captures: whether steps are captured as graphs.
    """
    lengths = fullest_step(config)
    platform = platform_of(adapter.device)
    text, _ = _peak(platform, lambda: probe.dry_run(lengths))
    dtype: torch.dtype = getattr(torch, config.dtype)
    sampling, counts = _peak(
        platform,
        lambda: sample_full_batch(
            probe.sampler,
            config.max_num_seqs,
            info.vocab_size,
            dtype,
            adapter.device,
            config.max_logprobs,
            config.logprobs_mode,
        ),
    )
    width = adapter.embed(torch.zeros(1, dtype=torch.int64, device=adapter.device)).shape[-1]
    holds = (info.modalities and info.cross is None) or config.prompt_embeds
    embeds = config.max_encoder_tokens * width * dtype.itemsize if holds else 0
    tower = text * _CALL_ROWS // sum(lengths) if info.modalities else 0
    kept = counts + embeds
    if captures:
        kept += graph_rows(config) * info.vocab_size * dtype.itemsize + (KEPT_BYTES if info.modalities else 0)
    return MemoryProfile(text, tower, sampling, kept, text + tower if captures else 0)


def graph_rows(config: EngineConfig) -> int:
    """Rows of logits that graphs keep: those of decode steps, with adapters another set, and those of other steps."""
    num_kinds = 1 if config.max_loras == 0 else 2
    decode = graphs.kept_rows(config.max_num_seqs, num_kinds, sharing=config.prefix_caching)
    return decode + (mixed_graphs.kept_rows(config) if mixed_graphs.MixedGraphs.worth(config) else 0)


def sample_full_batch(
    sampler: Sampler | RankSampler,
    num_rows: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_logprobs: int = 20,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> None:
    """Sample a token for every row with the options that take most memory; the rows are free again afterwards.

    Before that, report a piece of a prompt, with two more copies of its logits as a soft cap makes them. After it,
    sample with fewer options and a single row, so that no request waits for kernels to be compiled.
    """
    logits_BV = torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)
    pieces_TV = [torch.zeros(PROMPT_ROWS, vocab_size, dtype=dtype, device=device) for _ in range(3)]
    num_top = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
    sampler.prompt_logprobs(pieces_TV[-1], torch.zeros(PROMPT_ROWS, dtype=torch.int64, device=device), num_top)
    pieces_TV.clear()
    for options in (replace(_COSTLY, logprobs=num_top, logprobs_mode=mode), *_CHEAPER):
        for rows in (range(num_rows), range(1)):
            for row in rows:
                sampler.admit(row, options, (0,), 1)
            sampler.sample(logits_BV[: len(rows)], rows, [1] * len(rows))
            for row in rows:
                sampler.release(row)


def _peak(platform: Platform, run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `run` held at most, and bytes that are still held after it."""
    platform.synchronize()
    before = platform.allocated_bytes()
    platform.reset_peak()
    run()
    platform.synchronize()
    return platform.peak_bytes() - before, max(0, platform.allocated_bytes() - before)
