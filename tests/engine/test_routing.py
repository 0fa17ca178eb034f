"""The router: what is cached is found, loads stay even, and its books close."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.core.media import MediaItem, MediaSpan
from beheld.core.pooling_params import Pooling
from beheld.core.request import LoRARequest, Request
from beheld.engine.routing import CHUNK_TOKENS, Route, Router

PARAMS: Any = Pooling.__new__(Pooling)
EMBEDS = 100


def image(number: int) -> MediaItem:
    return MediaItem("image", number.to_bytes(32, "big"), {}, {}, (7,) * EMBEDS, None, EMBEDS)


def request(name: str, ids: list[int], images: tuple[int, ...] = (), **more: Any) -> Request:
    """A prompt with its images first."""
    spans = tuple(MediaSpan(image(number), i * EMBEDS, (i + 1) * EMBEDS) for i, number in enumerate(images))
    return Request(name, (7,) * (EMBEDS * len(images)) + tuple(ids), PARAMS, spans, **more)


def routed(router: Router, one: Request, serving: tuple[int, ...]) -> Route:
    """Route a request that ends before the next."""
    route = router.choose(one, serving)
    router.computed(route)
    router.ended(route, computed=True)
    return route


def test_new_prompts_are_shared_out_evenly() -> None:
    router = Router(3, 10_000, 2048)
    chosen = [router.choose(request(str(i), [i] * 50), (0, 1, 2)).engine for i in range(30)]
    assert [chosen.count(engine) for engine in range(3)] == [10, 10, 10]


def test_prompt_follows_its_prefix() -> None:
    router = Router(4, 10_000, 2048)
    prefixes = {key: [key] * (3 * CHUNK_TOKENS) for key in range(8)}
    first = {key: routed(router, request("a", [*ids, 1]), (0, 1, 2, 3)).engine for key, ids in prefixes.items()}
    assert len(set(first.values())) == 4
    for key, ids in prefixes.items():
        route = routed(router, request("b", [*ids, *[2] * 10]), (0, 1, 2, 3))
        assert (route.engine, route.tokens) == (first[key], 10)


def test_salt_adapter_and_media_divide_prefixes() -> None:
    router = Router(2, 10_000, 2048)
    ids = [5] * 300
    routed(router, request("a", ids), (0, 1))
    for other in (
        request("b", ids, salt=b"other"),
        request("c", ids, lora=LoRARequest("x", 1, "/x")),
        request("d", ids, (1,)),
    ):
        assert routed(router, other, (0, 1)).tokens >= 300
    same = request("e", ids, (2,))
    assert routed(router, same, (0, 1)).tokens > routed(router, same, (0, 1)).tokens


def test_repeated_images_are_found_under_load() -> None:
    """100 images asked about 2,000 times, 16 at a time for each engine, of which engines end several at once."""
    draw = random.Random(0)
    for num_engines in (2, 4, 8):
        router, running = Router(num_engines, 10_000, 2048), []
        for number in range(2000):
            one = request(str(number), [number] * draw.randrange(10, 400), (draw.randrange(100),))
            running.append(router.choose(one, range(num_engines)))
            if len(running) == 16 * num_engines:
                # A step of one engine computes several at once.
                engine = draw.randrange(num_engines)
                ended = [route for route in running if route.engine == engine][:4]
                running = [route for route in running if route not in ended]
                for each in ended:
                    router.computed(each)
                    router.ended(each, computed=True)
        assert router.stats.num_repeated > 1800
        assert router.stats.num_found >= 0.95 * router.stats.num_repeated


def test_image_stays_with_an_engine_that_is_ahead_by_less_than_encoding_costs() -> None:
    """One engine is held up while the other has ended everything: a known image stays, a new one does not."""
    router = Router(2, 10_000, 2048)
    held = [router.choose(request(str(number), [number] * 20, (number,)), (0,)) for number in range(20)]
    for route in held:
        router.computed(route)
    assert routed(router, request("new", [8] * 20, (99,)), (0, 1)).engine == 1
    again = routed(router, request("known", [9] * 20, (3,)), (0, 1))
    assert again.engine == 0
    assert (router.stats.num_repeated, router.stats.num_found) == (1, 1)
    # Text of which nothing is known saves nothing there.
    assert routed(router, request("text", [10] * 20), (0, 1)).engine == 1
    # Further ahead than that, the image is encoded once more and both have it.
    for number in range(20, 40):
        router.choose(request(str(number), [number] * 20, (number,)), (0,))
    assert routed(router, request("busy", [11] * 20, (3,)), (0, 1)).engine == 1


def test_a_long_prefix_of_all_requests_leaves_no_engine_idle() -> None:
    router = Router(2, 10_000, 2048)
    shared = list(range(8192))
    chosen = [router.choose(request(str(i), [*shared, i]), (0, 1)) for i in range(40)]
    assert {route.engine for route in chosen} == {0, 1}
    assert router.stats.found_tokens == 39 * 8192 - 8192


def test_image_that_everybody_asks_about_goes_to_all() -> None:
    router = Router(2, 10_000, 2048)
    chosen = [router.choose(request(str(i), [i] * 20, (1,)), (0, 1)).engine for i in range(60)]
    assert 20 <= chosen.count(0) <= 40


def test_image_that_the_engine_dropped_is_not_sought() -> None:
    router = Router(2, 2 * EMBEDS, 2048)
    first = routed(router, request("a", [], (1,)), (0,))
    for number in (2, 3):
        routed(router, request("b", [], (number,)), (0,))
    again = routed(router, request("c", [9], (1,)), (0,))
    assert again.tokens > first.tokens / 2
    assert router.stats.num_repeated == 0


def test_engine_that_died_is_not_chosen_and_has_nothing_left() -> None:
    router = Router(2, 10_000, 2048)
    one = request("a", [4] * 500, (1,))
    dead = routed(router, one, (0, 1)).engine
    router.forget(dead)
    other = routed(router, one, (1 - dead,))
    assert other.engine == 1 - dead
    assert routed(router, one, (0, 1)).engine == 1 - dead


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_books_close(data: st.DataObject) -> None:
    """After any order of requests, ends and deaths, an idle router has no load; loads are never negative."""
    num_engines = data.draw(st.integers(1, 4))
    router = Router(num_engines, data.draw(st.integers(1, 1000)), data.draw(st.integers(1, 2048)))
    live: list[tuple[Route, bool]] = []
    for number in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(("route", "route", "compute", "end", "forget", "clear")))
        if act == "route":
            serving = data.draw(st.sets(st.integers(0, num_engines - 1), min_size=1))
            ids = [data.draw(st.integers(0, 2))] * data.draw(st.integers(1, 200))
            images = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
            route = router.choose(request(str(number), ids, images), sorted(serving))
            assert route.engine in serving
            assert route.tokens >= 1
            live.append((route, False))
        elif act == "forget":
            router.forget(data.draw(st.integers(0, num_engines - 1)))
        elif act == "clear":
            router.forget_prefixes()
        elif live:
            route, computed = live.pop(data.draw(st.integers(0, len(live) - 1)))
            if act == "compute" and not computed:
                router.computed(route)
                live.append((route, True))
            else:
                router.ended(route, computed=computed)
        assert all(router.load(engine) >= 0 for engine in range(num_engines))
    for route, computed in live:
        router.ended(route, computed=computed)
    assert [router.load(engine) for engine in range(num_engines)] == [0] * num_engines
    assert router.stats.num_found <= router.stats.num_repeated
    assert router.stats.found_tokens <= router.stats.prefix_tokens
