"""What the server counts, from what its parts tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from beheld.core.outputs import CompletionOutput, RequestOutput
from beheld.engine.stats import EngineStats
from beheld.scheduler.step_builder import SchedulerStats
from beheld.server.metrics import Metrics, counted, summed
from tests.server.running import Running

COUNTS = SchedulerStats(
    num_running=0,
    num_waiting=0,
    num_free_blocks=(8,),
    num_blocks=(8,),
    num_cached_blocks=(0,),
    num_preemptions=0,
    prefix_queries=0,
    prefix_hits=0,
    num_embeds=0,
    max_embeds=8,
    num_encoded=0,
    num_reused=0,
)


def test_towers_are_a_stage_of_media() -> None:
    """Count and seconds are those of the engine, however often somebody looks."""
    metrics = Metrics()

    def seen(num: int, seconds: float) -> tuple[float, float, float]:
        stats = EngineStats(replace(COUNTS, num_encoded=num), 1, 0, seconds)
        lines = dict(line.rsplit(" ", 1) for line in metrics.text(stats, 0).decode().splitlines() if line[:1] != "#")
        name, labels = "beheld_media_stage_seconds", 'modality="all",stage="encode"'
        within = lines.get(f'{name}_bucket{{le="0.1",{labels}}}', 0)
        return (
            float(lines.get(f"{name}_count{{{labels}}}", 0)),
            float(lines.get(f"{name}_sum{{{labels}}}", 0)),
            float(within),
        )

    assert seen(0, 0.0) == (0, 0, 0)
    assert seen(2, 0.0) == (0, 0, 0), "launched, and not measured yet"
    assert seen(2, 0.1) == (2, 0.1, 2)
    assert seen(2, 0.1) == (2, 0.1, 2)
    count, total, within = seen(3, 0.6)
    assert (count, round(total, 9), within) == (3, 0.6, 2)


def test_figures_have_the_names_that_vllm_gives_them() -> None:
    """Dashboards and autoscalers ask for these."""
    metrics = Metrics("mine")
    counts = replace(COUNTS, num_running=2, num_waiting=3, num_free_blocks=(6,), num_preemptions=4, prefix_hits=5)
    ended = RequestOutput(
        "1",
        None,
        [1, 2, 3],
        [CompletionOutput(0, "x", [7, 8], None, None, "length")],
        True,
        milliseconds={"prepare": 10.0, "queue": 20.0, "prefill": 30.0, "decode": 40.0, "first_token": 60.0},
    )
    metrics.generated(ended, 2)
    for _ in range(2):
        text = metrics.text(EngineStats(counts, 1, 0), 0).decode()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:") and sample.labels.items() >= {("model_name", "mine"), ("engine", "0")}
        if sample.labels.get("finished_reason", "length") == "length"
    }
    assert {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 4,
        "vllm:prefix_cache_hits_total": 5,
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 2,
        "vllm:request_success_total": 1,
        "vllm:request_generation_tokens_sum": 2,
        "vllm:time_to_first_token_seconds_sum": 0.06,
        "vllm:e2e_request_latency_seconds_sum": pytest.approx(0.1),
        "vllm:request_queue_time_seconds_sum": 0.02,
        "vllm:request_inference_time_seconds_sum": pytest.approx(0.07),
        "vllm:request_decode_time_seconds_count": 1,
    }.items() <= found.items()
    assert 'finished_reason="length"' in text


def test_before_the_first_request_counters_of_vllms_are_0() -> None:
    """One that is absent until then gives a rate that misses the first request."""
    found = dict(line.rsplit(" ", 1) for line in Metrics("mine").text(None, 0).decode().splitlines())
    labels = 'engine="0",model_name="mine"'
    for name in (
        f"vllm:prompt_tokens_total{{{labels}}}",
        f"vllm:generation_tokens_total{{{labels}}}",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="mine"}',
        f"vllm:request_prompt_tokens_count{{{labels}}}",
        f"vllm:request_generation_tokens_count{{{labels}}}",
        f"vllm:time_to_first_token_seconds_count{{{labels}}}",
        f"vllm:e2e_request_latency_seconds_sum{{{labels}}}",
    ):
        assert float(found[name]) == 0


def test_of_fronts_that_have_ended_counters_and_histograms_are_kept() -> None:
    metrics = Metrics()
    metrics.answered("chat", 200, 0.003)
    kept = counted([b"", metrics.text(None, 2)])
    found = dict(line.rsplit(" ", 1) for line in counted([kept, kept]).decode().splitlines() if line[:1] != "#")
    assert float(found['beheld_requests_total{route="chat",status="200"}']) == 2
    assert float(found['beheld_request_seconds_count{route="chat"}']) == 2
    assert 'beheld_requests_created{route="chat",status="200"}' in found
    assert not [name for name in found if name.startswith(("beheld_answers_in_work", "beheld_held_bytes"))]


def test_metrics_of_several_fronts_are_summed() -> None:
    """Counters, histograms and gauges of all; a label that one front alone has; the first time of making."""
    fronts = [Metrics(), Metrics()]
    for number, metrics in enumerate(fronts):
        metrics.answered("chat", 200, 0.003)
        metrics.answered(f"route{number}", 200, 1.7)
    texts = [metrics.text(None, 2 + number) for number, metrics in enumerate(fronts)]
    found = dict(line.rsplit(" ", 1) for line in summed(texts).decode().splitlines() if line[:1] != "#")
    one = [dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[:1] != "#") for text in texts]
    assert float(found['beheld_requests_total{route="chat",status="200"}']) == 2
    assert [float(found[f'beheld_requests_total{{route="route{n}",status="200"}}']) for n in (0, 1)] == [1, 1]
    assert float(found['beheld_request_seconds_bucket{le="0.005",route="chat"}']) == 2
    assert float(found['beheld_request_seconds_bucket{le="1.0",route="route1"}']) == 0
    assert float(found['beheld_request_seconds_sum{route="chat"}']) == 0.006
    assert float(found["beheld_answers_in_work"]) == 5
    created = 'beheld_requests_created{route="chat",status="200"}'
    assert float(found[created]) == min(float(each[created]) for each in one)
    # What a reader of the format makes of it.
    families = {family.name: family for family in text_string_to_metric_families(summed(texts).decode())}
    assert families["beheld_request_seconds"].type == "histogram"
    assert len(families["beheld_requests"].samples) == 3
    names = [[line.rpartition(" ")[0] for line in text.decode().splitlines()] for text in (summed(texts[:1]), texts[0])]
    assert names[0] == names[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "begin"),
    [("TEXT", "TEXT named_metrics.kv_cache_usage_perc="), ("json", 'JSON {"named_metrics": {"kv_cache'), ("xml", None)],
)
def test_an_answer_tells_gateways_the_load(running: Running, form: str, begin: str | None, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
    plain = running.post("/v1/completions", body)
    told = running.post("/v1/completions", body, headers={"endpoint-load-metrics-format": form})
    assert "endpoint-load-metrics" not in plain.headers
    assert told.headers.get("endpoint-load-metrics", "").startswith(begin or "")
    assert ("endpoint-load-metrics" in told.headers) == (begin is not None)
