"""The server's metrics for Prometheus; every label has a bounded set of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from beheld.api.async_llm import AsyncLLM, EngineReport, EngineState, EngineStats
from beheld.core.outputs import PoolingRequestOutput, RequestOutput
from beheld.server.vllm_metrics import VllmMetrics
from beheld.utils.allocator import held_bytes

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGES = ("prepare", "queue", "prefill", "decode")
_SCHEDULER_COUNTS = ("num_preemptions", "prefix_queries", "prefix_hits", "num_encoded", "num_reused")
_ROUTING_COUNTS = (
    "num_requests",
    "num_repeated",
    "num_found",
    "prefix_tokens",
    "found_tokens",
    "num_retried",
    "num_lost",
    "seconds",
)


class Metrics:
    """The metrics of one server, in their own registry.

    Args:
        model: the served name of the model, which vLLM's names of metrics have as a label.
        llm: the model; None leaves out what only it knows.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str = "", llm: AsyncLLM | None = None) -> None:
        registry = self._registry = CollectorRegistry()
        self._vllm = VllmMetrics(registry, model, llm)
        self._requests = Counter("beheld_requests", "Answered requests.", ("route", "status"), registry=registry)
        self._latency = Histogram(
            "beheld_request_seconds",
            "Seconds from a request to the end of its response.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._first = Histogram(
            "beheld_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._stages = Histogram(
            "beheld_stage_seconds",
            "Seconds per stage of a request, in order: prepare, queue, prefill, decode.",
            ("stage",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._media_stages = Histogram(
            "beheld_media_stage_seconds",
            "Seconds per stage of a media item: fetch, decode, digest, process, ...; encode covers all modalities.",
            ("modality", "stage"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._seen_encoded = (0, 0.0)
        self._encode = Gauge(
            "beheld_encode_seconds", "Seconds of tower runs since the start.", ("engine",), registry=registry
        )
        self._media = Counter("beheld_media_items", "Media items.", ("modality", "cached"), registry=registry)
        self._prompt = Counter("beheld_prompt_tokens", "Prompt tokens.", registry=registry)
        self._cached = Counter("beheld_cached_tokens", "Prompt tokens from the prefix cache.", registry=registry)
        self._answer = Counter("beheld_answer_tokens", "Tokens of answers.", registry=registry)
        self._running = Gauge("beheld_sequences", "Sequences by state.", ("engine", "state"), registry=registry)
        self._blocks = Gauge("beheld_kv_blocks", "KV blocks by state.", ("engine", "state"), registry=registry)
        self._engine = Gauge(
            "beheld_engine", "Counts of an engine since its start.", ("engine", "count"), registry=registry
        )
        self._serving = Gauge(
            "beheld_engine_serving",
            "1 for an engine that serves, 0 for one that starts.",
            ("engine",),
            registry=registry,
        )
        self._restarts = Gauge(
            "beheld_engine_restarts", "Times that an engine was replaced.", ("engine",), registry=registry
        )
        self._routing = Gauge(
            "beheld_routing", "Counts of how several engines share out requests.", ("count",), registry=registry
        )
        self._without_effect = Counter(
            "beheld_fields_without_effect",
            "Fields of requests that were accepted without effect.",
            ("field",),
            registry=registry,
        )
        self._lag = Histogram(
            "beheld_event_loop_lag_seconds", "Delay of the event loop in seconds.", buckets=_SECONDS, registry=registry
        )
        self._held = Gauge(
            "beheld_held_bytes",
            "Bytes of memory in use; an engine in a thread counts as the server's process.",
            ("process",),
            registry=registry,
        )
        self._fronts = Gauge(
            "beheld_fronts",
            "Of several processes that speak HTTP: all, and those whose figures here are up to date.",
            ("state",),
            registry=registry,
        )
        self._busy = Gauge("beheld_answers_in_work", "Answers that the server is computing.", registry=registry)

    def lagged(self, seconds: float) -> None:
        """Record a delay of the event loop."""
        self._lag.observe(seconds)

    def asked_fronts(self, num_all: int, num_new: int) -> None:
        """Record how many fronts there are, and how many have given their figures."""
        self._fronts.labels("all").set(num_all)
        self._fronts.labels("answered").set(num_new)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Record the end of a response."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def accepted(self, fields: Iterable[str]) -> None:
        """Record the fields of a request that have no effect."""
        for name in fields:
            self._without_effect.labels(name).inc()

    def generated(self, last: RequestOutput | PoolingRequestOutput, answer_tokens: int) -> None:
        """Record the end of an engine request; `last` is its last output."""
        self._vllm.generated(last, answer_tokens)
        self._prompt.inc(last.usage.prompt_tokens)
        self._answer.inc(answer_tokens)
        self._cached.inc(last.num_cached_tokens)
        self._first.observe(last.milliseconds.get("first_token", 0.0) / 1e3)
        for stage in _STAGES:
            self._stages.labels(stage).observe(last.milliseconds.get(stage, 0.0) / 1e3)
        for receipt in last.media:
            self._media.labels(receipt.modality, str(receipt.cached).lower()).inc()
            for stage, milliseconds in receipt.milliseconds.items():
                self._media_stages.labels(receipt.modality, stage).observe(milliseconds / 1e3)

    def text(self, stats: EngineStats | None, busy: int, refused: int = 0) -> bytes:
        """The metrics as text, with the engine's present state if it is available.

        Args:
            stats: the engine's state.
            busy: answers in work.
            refused: requests that were refused because too many ran.
        """
        self._busy.set(busy)
        self._vllm.num_refused = refused
        self._hold("server", held_bytes())
        if stats is not None:
            for report in stats.engines:
                self._report(report)
            if not stats.engines:
                self._count("0", stats)
            if stats.routing is not None:
                for name in _ROUTING_COUNTS:
                    self._routing.labels(name).set(getattr(stats.routing, name))
            self._towers_ran(stats.scheduler.num_encoded, stats.encode_s)
            self._hold("engine", stats.held_bytes)
        return generate_latest(self._registry)

    def _report(self, report: EngineReport) -> None:
        """The state of an engine of several; its counts if it has answered since it started."""
        engine = str(report.engine)
        self._serving.labels(engine).set(report.state is not EngineState.STARTING)
        self._restarts.labels(engine).set(report.restarts)
        if report.stats is not None:
            self._count(engine, report.stats)

    def _count(self, engine: str, stats: EngineStats) -> None:
        """The counts of one engine."""
        counts = stats.scheduler
        self._vllm.counted(engine, stats)
        self._running.labels(engine, "running").set(counts.num_running)
        self._running.labels(engine, "waiting").set(counts.num_waiting)
        self._blocks.labels(engine, "free").set(sum(counts.num_free_blocks))
        self._blocks.labels(engine, "cached").set(sum(counts.num_cached_blocks))
        self._blocks.labels(engine, "all").set(sum(counts.num_blocks))
        for name in _SCHEDULER_COUNTS:
            self._engine.labels(engine, name).set(getattr(counts, name))
        self._encode.labels(engine).set(stats.encode_s)
        self._engine.labels(engine, "steps").set(stats.steps)
        self._engine.labels(engine, "retried_steps").set(stats.retried)
        self._engine.labels(engine, "unread_messages").set(stats.num_unread)

    def _towers_ran(self, num_items: int, seconds: float) -> None:
        """Record the stage "encode" of the items encoded since the last call.

        A tower encodes several items at once, also from different requests. Only their number and total seconds are
        known, so each counts with the mean.
        """
        before_items, before_s = self._seen_encoded
        num, spent = num_items - before_items, seconds - before_s
        if num < 0:
            # An engine of several was replaced, and counts from 0 again.
            self._seen_encoded = (num_items, seconds)
        if num > 0 and spent > 0:
            self._seen_encoded = (num_items, seconds)
            stage = self._media_stages.labels("all", "encode")
            for _ in range(num):
                stage.observe(spent / num)

    def _hold(self, process: str, held: int | None) -> None:
        if held is not None:
            self._held.labels(process).set(held)


def summed(texts: Sequence[bytes]) -> bytes:
    """The metrics of several fronts as those of one: sums of all samples, in the order of the first text.

    Of times at which counters were made, the first.
    """
    families: dict[str, list[str]] = {}
    values: dict[str, float] = {}
    for text in texts:
        family: list[str] = []
        for line in text.decode().splitlines():
            if line.startswith("# HELP"):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if line.startswith("#"):
                if line not in family:
                    family.append(line)
                continue
            sample, _, value = line.rpartition(" ")
            if sample not in values:
                family.append(sample)
                values[sample] = float(value)
            elif sample.partition("{")[0].endswith("_created"):
                values[sample] = min(values[sample], float(value))
            else:
                values[sample] += float(value)
    lines = (line if line[0] == "#" else f"{line} {values[line]}" for family in families.values() for line in family)
    return "".join(f"{line}\n" for line in lines).encode()


def counted(texts: Sequence[bytes]) -> bytes:
    """What fronts that have ended had counted: of their metrics those that only grow, summed."""
    kept: list[str] = []
    head, grows = "", False
    for line in summed(texts).decode().splitlines():
        if line.startswith("# HELP"):
            head = line
        elif line.startswith("# TYPE"):
            name, kind = line.split(" ")[2:]
            # The times at which counters were made are gauges by their type.
            grows = kind in ("counter", "histogram") or name.endswith("_created")
            kept += [head, line] if grows else []
        elif grows:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept).encode()
