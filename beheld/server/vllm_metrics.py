"""Metrics under the names that vLLM gives them, for dashboards, autoscalers and gateways that were made for it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from beheld.api.async_llm import EngineStats
from beheld.api.vllm_counts import values_of
from beheld.core.outputs import PoolingRequestOutput, RequestOutput
from beheld.core.request import FinishReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
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
_GAUGES = {
    "num_requests_running": "Sequences that are computed.",
    "num_requests_waiting": "Sequences that wait.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that are in use, from 0 to 1.",
}
_COUNTERS = {
    "num_preemptions": "Sequences that were interrupted.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found there.",
    "mm_cache_queries": "Media items that prompts had.",
    "mm_cache_hits": "Media items whose embeddings were held.",
}


class VllmMetrics(Collector):
    """vLLM's names for what the server knows; engine 0 stands for all where an answer does not say which one it was.

    Args:
        registry: what shows them.
        model: the served name of the model.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        # Engine -> its values.
        self._held: dict[str, dict[str, float]] = {}
        self._stages = [
            (
                Histogram(
                    f"vllm:{name}", f"Seconds: {', '.join(stages)}.", _LABELS, buckets=_SECONDS, registry=registry
                ),
                stages,
            )
            for name, stages in _STAGES.items()
        ]
        self._num_prompt = Histogram(
            "vllm:request_prompt_tokens", "Tokens of prompts.", _LABELS, buckets=_TOKENS, registry=registry
        )
        self._num_answer = Histogram(
            "vllm:request_generation_tokens", "Tokens of answers.", _LABELS, buckets=_TOKENS, registry=registry
        )
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", _LABELS, registry=registry)
        self._answer = Counter("vllm:generation_tokens", "Tokens of answers.", _LABELS, registry=registry)
        self._success = Counter(
            "vllm:request_success", "Answers that ended.", (*_LABELS, "finished_reason"), registry=registry
        )
        # Without a value they would be absent until a request has ended, and a rate would miss the first.
        for metric in (*(each for each, _ in self._stages), self._num_prompt, self._num_answer):
            metric.labels(model, "0")
        for counter in (self._prompt, self._answer):
            counter.labels(model, "0")
        for reason in FinishReason:
            self._success.labels(model, "0", reason)
        registry.register(self)

    def generated(self, last: RequestOutput | PoolingRequestOutput, answer_tokens: int) -> None:
        """Record the end of an engine request; `last` is its last output."""
        labels = self._model, "0"
        self._prompt.labels(*labels).inc(last.usage.prompt_tokens)
        self._answer.labels(*labels).inc(answer_tokens)
        self._num_prompt.labels(*labels).observe(last.usage.prompt_tokens)
        self._num_answer.labels(*labels).observe(answer_tokens)
        for histogram, stages in self._stages:
            spent = [last.milliseconds[stage] for stage in stages if stage in last.milliseconds]
            if spent:
                histogram.labels(*labels).observe(sum(spent) / 1e3)
        answers = last.outputs if isinstance(last, RequestOutput) else ()
        for answer in answers:
            if answer.finish_reason is not None:
                self._success.labels(*labels, answer.finish_reason).inc()

    def counted(self, engine: str, stats: EngineStats) -> None:
        """Take the present counts of an engine."""
        self._held[engine] = values_of(stats)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The engines' state and counts, as the registry asks for them."""
        for kind, named in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, meaning in named.items():
                family = kind(f"vllm:{name}", meaning, labels=_LABELS)
                for engine, values in self._held.items():
                    family.add_metric((self._model, engine), values[name])
                yield family
