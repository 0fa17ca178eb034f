"""Metrics under the names that vLLM gives them, for dashboards, autoscalers and gateways that were made for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from beheld.api.async_llm import AsyncLLM, EngineStats
from beheld.api.vllm_counts import CACHE_CONFIG, SLEEP_STATES, cache_config, values_of
from beheld.core.outputs import PoolingRequestOutput, RequestOutput
from beheld.core.plan import STEP_TOKENS
from beheld.core.request import FinishReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_ANSWERS = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")
# Histogram -> the stages of a request whose seconds it counts.
_STAGES = {
    "time_to_first_token_seconds": ("first_token",),
    "e2e_request_latency_seconds": ("prepare", "queue", "prefill", "decode"),
    "request_queue_time_seconds": ("queue",),
    "request_inference_time_seconds": ("prefill", "decode"),
    "request_prefill_time_seconds": ("prefill",),
    "request_decode_time_seconds": ("decode",),
}
# Other histograms of ended requests, and their bounds.
_OF_REQUESTS = {
    "request_prompt_tokens": ("Tokens of prompts.", _TOKENS),
    "request_generation_tokens": ("Tokens of answers.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Tokens of prompts that no cached prefix covered.", _TOKENS),
    "request_time_per_output_token_seconds": ("Mean seconds from token to token of an answer.", _SECONDS),
    "request_params_n": ("Answers asked for.", _ANSWERS),
    "request_params_max_tokens": ("The most tokens that an answer might have.", _TOKENS),
    "request_num_preemptions": ("How often a request's answers were interrupted.", _ANSWERS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest answer.", _TOKENS),
}
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_GAUGES = {
    "num_requests_running": "Sequences that are computed.",
    "num_requests_waiting": "Sequences that wait.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that are in use, from 0 to 1.",
}
_COUNTERS = {
    "num_preemptions": "Sequences that were interrupted.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found there.",
    "external_prefix_cache_queries": "Prompt tokens that were looked up in the folder of kv_transfer_config.",
    "external_prefix_cache_hits": "Prompt tokens that were taken from there.",
    "mm_cache_queries": "Media items that prompts had.",
    "mm_cache_hits": "Media items whose embeddings were held.",
}


class VllmMetrics(Collector):
    """vLLM's names for what the server knows; engine 0 stands for all where an answer does not say which one it was.

    Args:
        registry: what shows them.
        model: the served name of the model.
        llm: the model; None leaves out what only it knows.

    Attributes:
        num_refused: requests that were refused because too many ran.
    """

    def __init__(self, registry: CollectorRegistry, model: str, llm: AsyncLLM | None = None) -> None:
        self.num_refused = 0
        self._model = model
        self._llm = llm
        # Engine -> its counts.
        self._held: dict[str, EngineStats] = {}
        self._stages = [
            (
                Histogram(
                    f"vllm:{name}", f"Seconds: {', '.join(stages)}.", _LABELS, buckets=_SECONDS, registry=registry
                ),
                stages,
            )
            for name, stages in _STAGES.items()
        ]
        self._of_requests = {
            name: Histogram(f"vllm:{name}", meaning, _LABELS, buckets=bounds, registry=registry)
            for name, (meaning, bounds) in _OF_REQUESTS.items()
        }
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", _LABELS, registry=registry)
        self._cached = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", _LABELS, registry=registry
        )
        self._sources = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens.", (*_LABELS, "source"), registry=registry
        )
        self._answer = Counter("vllm:generation_tokens", "Tokens of answers.", _LABELS, registry=registry)
        self._success = Counter(
            "vllm:request_success", "Answers that ended.", (*_LABELS, "finished_reason"), registry=registry
        )
        # Without a value they would be absent until a request has ended, and a rate would miss the first.
        for metric in (*(each for each, _ in self._stages), *self._of_requests.values()):
            metric.labels(model, "0")
        for counter in (self._prompt, self._cached, self._answer):
            counter.labels(model, "0")
        for source in _SOURCES:
            self._sources.labels(model, "0", source)
        for reason in FinishReason:
            self._success.labels(model, "0", reason)
        registry.register(self)

    def generated(self, last: RequestOutput | PoolingRequestOutput, answer_tokens: int) -> None:
        """Record the end of an engine request; `last` is its last output."""
        labels = self._model, "0"
        num_prompt, cached = last.usage.prompt_tokens, last.num_cached_tokens
        self._prompt.labels(*labels).inc(num_prompt)
        self._cached.labels(*labels).inc(cached)
        self._sources.labels(*labels, "local_compute").inc(max(0, num_prompt - cached))
        outside = last.num_external_tokens if isinstance(last, RequestOutput) else 0
        self._sources.labels(*labels, "local_cache_hit").inc(cached - outside)
        self._sources.labels(*labels, "external_kv_transfer").inc(outside)
        self._answer.labels(*labels).inc(answer_tokens)
        for histogram, stages in self._stages:
            spent = [last.milliseconds[stage] for stage in stages if stage in last.milliseconds]
            if spent:
                histogram.labels(*labels).observe(sum(spent) / 1e3)
        found: dict[str, float | None] = {
            "request_prompt_tokens": num_prompt,
            "request_generation_tokens": answer_tokens,
            "request_prefill_kv_computed_tokens": max(0, num_prompt - cached),
        }
        if isinstance(last, RequestOutput):
            found |= self._of_answers(last)
        for name, value in found.items():
            if value is not None:
                self._of_requests[name].labels(*labels).observe(value)

    def _of_answers(self, last: RequestOutput) -> dict[str, float | None]:
        """What the answers of an ended request add to the histograms; counts how they ended."""
        metrics = last.metrics
        if metrics is None:
            # A search, whose answers come together.
            reasons: Sequence[str | None] = [answer.finish_reason for answer in last.outputs]
        else:
            reasons = metrics.finish_reasons
        for reason in filter(None, reasons):
            self._success.labels(self._model, "0", reason).inc()
        if metrics is None:
            longest = max((len(answer.token_ids) for answer in last.outputs), default=0)
            return {"request_params_n": len(last.outputs), "request_max_num_generation_tokens": longest}
        gaps, decode_s = metrics.max_answer_tokens - 1, last.milliseconds.get("decode", 0.0) / 1e3
        return {
            "request_time_per_output_token_seconds": decode_s / gaps if gaps > 0 else None,
            "request_params_n": metrics.num_answers,
            "request_params_max_tokens": metrics.max_tokens,
            "request_num_preemptions": metrics.num_preemptions,
            "request_max_num_generation_tokens": metrics.max_answer_tokens,
        }

    def counted(self, engine: str, stats: EngineStats) -> None:
        """Take the present counts of an engine."""
        self._held[engine] = stats

    def collect(self) -> Iterator[Metric]:
        """The engines' state and counts, as the registry asks for them."""
        values = {engine: values_of(stats) for engine, stats in self._held.items()}
        for kind, named in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, meaning in named.items():
                family = kind(f"vllm:{name}", meaning, labels=_LABELS)
                for engine, own in values.items():
                    family.add_metric((self._model, engine), own[name])
                yield family
        yield self._refused()
        yield self._waiting(values)
        yield self._step_tokens()
        yield self._token_gaps()
        yield from self._of_engines()

    def _refused(self) -> Metric:
        meaning = "Requests that were refused: there were too many, or too many tokens, by which none are."
        family = CounterMetricFamily("vllm:admission_rejections", meaning, labels=("model_name", "reason"))
        family.add_metric((self._model, "max_num_queued_reqs"), self.num_refused)
        family.add_metric((self._model, "max_num_queued_tokens"), 0)
        return family

    def _waiting(self, values: dict[str, dict[str, float]]) -> Metric:
        meaning = "Sequences that wait: for room, or for something else, which none does."
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", meaning, labels=(*_LABELS, "reason"))
        for engine, own in values.items():
            family.add_metric((self._model, engine, "capacity"), own["num_requests_waiting"])
            family.add_metric((self._model, engine, "deferred"), 0)
        return family

    def _step_tokens(self) -> Metric:
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of prompts and of answers in a step.", labels=_LABELS
        )
        for engine, stats in self._held.items():
            held = stats.scheduler
            if held.steps_by_tokens:
                buckets = _cumulative(STEP_TOKENS, held.steps_by_tokens)
                family.add_metric((self._model, engine), buckets, held.num_tokens)
        return family

    def _token_gaps(self) -> Metric:
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Seconds from token to token of answers.", labels=_LABELS
        )
        if self._llm is not None:
            gaps = self._llm.token_gaps
            family.add_metric((self._model, "0"), _cumulative(gaps.bounds, gaps.counts), gaps.total)
        return family

    def _of_engines(self) -> Iterator[Metric]:
        """What is known of the engines themselves; of several fronts the one that has them tells it."""
        names: tuple[str, ...] = ("engine", *CACHE_CONFIG)
        info = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is made.", labels=names)
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state of an engine.", labels=(*_LABELS, "sleep_state")
        )
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        loras = GaugeMetricFamily("vllm:lora_requests_info", "When these adapters ran and waited.", labels=names)
        if self._llm is not None and self._held:
            config = self._llm.config
            for engine, stats in self._held.items():
                made = cache_config(config, self._llm.info, stats)
                info.add_metric((engine, *(made[name] for name in CACHE_CONFIG)), 1)
                for level, state in enumerate(SLEEP_STATES):
                    sleep.add_metric((self._model, engine, state), int(level == self._llm.sleep_level))
            if config.max_loras:
                held = [stats.scheduler for stats in self._held.values()]
                running = sorted({name for each in held for name in each.running_loras})
                waiting = sorted({name for each in held for name in each.waiting_loras})
                loras.add_metric((str(config.max_loras), ",".join(running), ",".join(waiting)), time.time())
        yield from (info, sleep, loras)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """The buckets of a histogram: each counts all values up to its bound."""
    names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
