"""The live page of /metrics, and the dashboard for Grafana."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from beheld.server.app import _refused
from beheld.server.metrics import Metrics
from beheld.server.options import ServerOptions
from beheld.server.page import page
from tests.server.browser import CHROMIUM, Browser
from tests.server.running import Running, talk

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
GRAFANA = Path(__file__).parents[2] / "monitoring" / "grafana.json"
NAME = re.compile(r"beheld_[a-z_]+")


def known() -> set[str]:
    """The names of all series of a server that has not answered yet, and of histograms."""
    types = re.findall(r"# TYPE (\S+) (\w+)", Metrics().text(None, 0).decode())
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + end for name, kind in types for end in ends.get(kind, ("",))} | {name for name, _ in types}


def test_the_dashboards_ask_for_metrics_that_there_are() -> None:
    grafana = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in grafana["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 10
    for text in (*queries, page("dashboard").html):
        names = set(NAME.findall(text))
        assert names - known() == set()
    assert NAME.search(page("dashboard").html)


def test_the_panels_of_grafana_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    panels = json.loads(GRAFANA.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        cells |= own


def test_the_page_is_there_if_the_operator_wants_it(running: Running) -> None:
    answer = running.get("/dashboard")
    assert (answer.status_code, answer.text) == (200, page("dashboard").html)
    assert answer.headers["content-security-policy"] == page("dashboard").headers["Content-Security-Policy"]
    assert ServerOptions().show_dashboard is False


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


def at(browser: Browser, name: str) -> Any:
    return browser.run(f"TILES.find((tile) => tile.name === {name!r}).node.querySelector('.now').textContent")


@needs_browser
def test_rates_and_latencies_are_those_of_the_readings(running: Running, browser: Browser) -> None:
    browser.open(running.url + "/dashboard", 360, 720, "dark")
    browser.until("readings.length > 0")
    assert at(browser, "KV cache in use") == "0.0 %"
    # Two readings made here, ten seconds apart: 40 tokens, of whose 4 requests 3 took up to 0.1 s and one up to 0.25 s.
    one, two = (
        "\n".join(
            (
                f"beheld_answer_tokens_total {tokens}.0",
                f'beheld_first_token_seconds_bucket{{le="0.1"}} {soon}.0',
                f'beheld_first_token_seconds_bucket{{le="0.25"}} {count}.0',
                f'beheld_first_token_seconds_bucket{{le="+Inf"}} {count}.0',
                f"beheld_first_token_seconds_count {count}.0",
                'beheld_sequences{engine="0",state="waiting"} 2.0',
                'beheld_sequences{engine="1",state="waiting"} 3.0',
                *(f'beheld_kv_blocks{{engine="0",state="{state}"}} {num}' for state, num in BLOCKS.items()),
                *(f'beheld_engine_serving{{engine="{engine}"}} {engine}.0' for engine in (0, 1)),
            )
        )
        for tokens, soon, count in ((100, 5, 5), (140, 8, 9))
    )
    browser.run(f"""window.fetch = async () => new Response({json.dumps(two)});
      readings.splice(0, readings.length, {{ at: performance.now() / 1000 - 10, samples: parsed({json.dumps(one)}) }});
      look()""")
    assert at(browser, "Answer tokens a second") == "4.0"
    assert at(browser, "Sequences waiting") == "5"
    assert at(browser, "KV cache in use") == "25 %"
    # Two of four lie below two thirds of the first bucket of 0.1 s, evenly spread.
    assert at(browser, "Time to first token") == "67 ms"
    assert browser.run("[...document.querySelectorAll('#engines tr')].map((row) => row.cells[1].textContent)") == [
        "starts",
        "serves",
    ]
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    browser.run("window.fetch = async () => { throw new TypeError('gone'); }; look()")
    assert browser.run("find('state').textContent") == "the server does not answer"


BLOCKS = {"free": 75, "cached": 10, "all": 100}


@needs_browser
def test_what_a_server_answers_is_shown(running: Running, browser: Browser) -> None:
    browser.open(running.url + "/dashboard", 1100, 800, "light")
    browser.until("readings.length > 0")
    body = {"messages": talk("Hello"), "max_tokens": 5, "ignore_eos": True}
    assert running.post("/v1/chat/completions", body).status_code == 200
    browser.run("look()")
    assert browser.run("find('requests').textContent") == "mean of 1 in the last minute"
    assert at(browser, "Answer tokens a second") != "0"
    assert browser.run("find('state').textContent").startswith("live")


def test_where_it_is_off_the_error_says_how_it_is_switched_on() -> None:
    for path, remedy in (("/dashboard", "Start the server with --dashboard."), ("/other", "See /openapi.json.")):
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "server": ("a", 1)}
        answer = asyncio.run(_refused(Request(scope), HTTPException(404)))
        assert json.loads(answer.body)["error"]["remedy"] == remedy
