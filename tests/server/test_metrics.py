"""What the server counts, from what its parts tell it."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from beheld.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from beheld.engine.stats import EngineReport, EngineState, EngineStats, total
from beheld.scheduler.step_builder import SchedulerStats
from beheld.server.metrics import Metrics, counted, summed
from beheld.utils.tally import Tally
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
    counts = replace(counts, num_tokens=40, steps_by_tokens=(1, 0, 1, 1, *[0] * 10))
    ended = RequestOutput(
        "1",
        None,
        [1, 2, 3],
        [CompletionOutput(0, "x", [7, 8], None, None, "length")],
        True,
        num_cached_tokens=1,
        milliseconds={"prepare": 10.0, "queue": 20.0, "prefill": 30.0, "decode": 40.0, "first_token": 60.0},
        metrics=RequestMetrics(2, 0, 0, 0, 0, 0, 0, max_answer_tokens=2, max_tokens=9, finish_reasons=("length",)),
    )
    metrics.generated(ended, 2)
    for _ in range(2):
        text = metrics.text(EngineStats(counts, 1, 0), 0, refused=3).decode()
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
        "vllm:request_time_per_output_token_seconds_sum": 0.04,
        "vllm:request_prefill_kv_computed_tokens_sum": 2,
        "vllm:request_max_num_generation_tokens_sum": 2,
        "vllm:request_params_n_sum": 1,
        "vllm:request_params_max_tokens_sum": 9,
        "vllm:prompt_tokens_cached_total": 1,
        "vllm:external_prefix_cache_hits_total": 0,
        "vllm:iteration_tokens_total_sum": 40,
        "vllm:iteration_tokens_total_count": 3,
    }.items() <= found.items()
    assert 'finished_reason="length"' in text
    labels = 'engine="0",model_name="mine"'
    for line in (
        'vllm:iteration_tokens_total_bucket{engine="0",le="16.0",model_name="mine"} 2.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 2.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 1.0',
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 3.0',
        'vllm:admission_rejections_total{model_name="mine",reason="max_num_queued_reqs"} 3.0',
        'vllm:admission_rejections_total{model_name="mine",reason="max_num_queued_tokens"} 0.0',
    ):
        assert line in text.splitlines()


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


def figures(running: Running) -> dict[str, float]:
    """vLLM's series by name and their own label."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(running.get("/metrics").text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name in ("finished_reason", "sleep_state")]
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                found[" ".join((sample.name, *own))] = sample.value
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_times_from_token_to_token_are_counted_for_each(running: Running, stream: bool) -> None:
    """All tokens but the first of each answer, whether they are read as they come or at the end."""
    before = figures(running)
    body = {"prompt": "a small cat", "n": 2, "max_tokens": 70, "ignore_eos": True, "stream": stream}
    assert running.post("/v1/completions", body).status_code == 200
    after = figures(running)
    grown = {name: value - before[name] for name, value in after.items() if value != before[name]}
    gaps, each = "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds"
    assert grown[f"{gaps}_count"] == 2 * 69
    assert grown[f"{each}_count"] == 1
    # Both answers are computed at the same time, and the last token may be there before it is read.
    assert 0 < grown[f"{gaps}_sum"] / (2 * 69) <= grown[f"{each}_sum"] * 1.01
    assert grown["vllm:request_success_total length"] == 2
    assert after["vllm:request_num_preemptions_count"] == before["vllm:request_num_preemptions_count"] + 1
    assert grown["vllm:request_params_n_sum"] == 2
    assert grown["vllm:request_params_max_tokens_sum"] == grown["vllm:request_max_num_generation_tokens_sum"] == 70
    assert grown["vllm:generation_tokens_total"] == 140
    steps = grown["vllm:iteration_tokens_total_count"]
    assert 70 <= steps <= 72
    # The token that a prompt's last position gives counts, too; the answers end with tokens whose positions do not.
    assert grown["vllm:iteration_tokens_total_sum"] >= 2 * 70 + grown["vllm:request_prefill_kv_computed_tokens_sum"]


def test_the_cache_and_its_sleep_are_told() -> None:
    running = Running(operator_routes=True)
    try:
        info = re.search(r"^vllm:cache_config_info{(.*)} 1.0$", running.get("/metrics").text, re.MULTILINE)
        assert info is not None
        assert 'num_gpu_blocks="600"' in info[1]
        size, length = 600 * running.llm.config.block_size, running.llm.config.max_model_len
        assert f'kv_cache_size_tokens="{size}"' in info[1]
        assert f'kv_cache_max_concurrency="{size / length:.2f}"' in info[1]
        for path, state in (
            ("/sleep?level=2", "discard_all"),
            ("/wake_up", "awake"),
            ("/sleep?level=1", "weights_offloaded"),
        ):
            assert running.post(path, {}).status_code == 200
            found = figures(running)
            states = [name.split()[1] for name, value in found.items() if "sleep_state" in name and value]
            assert states == [state]
    finally:
        running.close()


def test_adapters_of_all_engines_are_told() -> None:
    config = SimpleNamespace(max_loras=2, block_size=16, kv_dtype="float32", prefix_caching=True, memory_fraction=0.9)
    config.max_model_len, info = 64, SimpleNamespace(paged_groups=())
    llm: Any = SimpleNamespace(token_gaps=Tally((1.0,)), config=config, info=info, sleep_level=0)
    parts = [replace(COUNTS, running_loras=frozenset("ab")), replace(COUNTS, waiting_loras=frozenset("c"))]
    stats = [EngineStats(part, 1, 0) for part in parts]
    each = tuple(EngineReport(n, EngineState.SERVING, 0, 0, 0, part) for n, part in enumerate(stats))
    for given in (total(stats), replace(total(stats), engines=each)):
        text = Metrics("mine", llm).text(given, 0).decode()
        labels = 'max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="c"'
        assert text.count("\nvllm:lora_requests_info{") == text.count(f"\nvllm:lora_requests_info{{{labels}}} ") == 1


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
