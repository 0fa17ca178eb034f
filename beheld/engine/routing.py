"""Chooses the engine of each request, so that cached prefixes and encoded media are found and no engine idles.

The router knows no engine. It remembers what it sent to each: chunks of prompts, by the hash of everything up to their
end, and the digests of media, up to the number of embeddings that an engine keeps. The cost of a request on an engine
is what the engine must still compute for it, in tokens; an engine's load is the costs of its requests. A request goes
where its cost is least, so that a prompt follows its prefix and an image its embeddings; among equals, to the least
load. An engine that is far busier than another gets none of either: computing something twice costs less than waiting.
How far it may be ahead grows with what it has of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from beheld.core.request import Request

CHUNK_TOKENS = 64
"""Tokens of a prompt that are looked up together: a few blocks of the KV cache."""

# Chunks that are remembered of one prompt and of one engine. Forgetting too late costs nothing: a prompt then goes
# where its prefix was, which is as good as elsewhere.
_MAX_CHUNKS = 1024
_MAX_REMEMBERED = 1 << 16
# What an item costs that must be encoded, in tokens of text: its features are sent, a tower is run for it, and reads
# several patches for each embedding.
_ITEM_TOKENS = 256
_EMBED_TOKENS = 2
# An engine gets no further requests while it has this many times another's requests or load, and this many requests or
# steps more as well. Loads fall by whole steps, so that a difference of one step means nothing.
_MAX_RATIO = 2
_MAX_REQUESTS_AHEAD = 16
_MAX_STEPS_AHEAD = 8
# What a sequence that decodes costs others, in tokens of a prompt.
_SEQUENCE_TOKENS = 64


@dataclass
class RoutingStats:
    """Counters since the start.

    Attributes:
        num_requests: requests that were routed.
        num_repeated: media items that some engine should have when they are routed.
        num_found: those of them that were routed to an engine that should have them.
        prefix_tokens: tokens of prompts that some engine should have in its prefix cache, the longest of each prompt.
        found_tokens: those of them that the chosen engine should have.
        num_retried: requests that an engine lost and another computed again.
        num_lost: requests that failed because their engine died.
        seconds: time spent on routing.
    """

    num_requests: int = 0
    num_repeated: int = 0
    num_found: int = 0
    prefix_tokens: int = 0
    found_tokens: int = 0
    num_retried: int = 0
    num_lost: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Route:
    """Where a request goes.

    Attributes:
        engine: number of the engine.
        tokens: what the engine must compute before the request's first token.
    """

    engine: int
    tokens: int


@dataclass
class _Memory:
    """What one engine was sent and should still have, the least recently used first; and its load in tokens."""

    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    embeds: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    num_embeds: int = 0
    load: int = 0
    num_requests: int = 0
    num_routed: int = 0


class Router:
    """Routes requests to engines; not thread-safe.

    Args:
        num_engines: they are numbered from 0.
        max_embeds: the embeddings that each keeps on its device.
        step_tokens: the most tokens that each computes in one step.
    """

    def __init__(self, num_engines: int, max_embeds: int, step_tokens: int) -> None:
        self.stats = RoutingStats()
        self._max_embeds = max_embeds
        self._step_tokens = step_tokens
        self._engines = [_Memory() for _ in range(num_engines)]

    def choose(self, request: Request, serving: Collection[int]) -> Route:
        """The engine for a request, among those that serve; its load includes the request until `ended`."""
        assert serving, "no engine serves"
        chunks = list(_chunks(request))
        embeds = {span.item.digest: span.item.num_kept for span in request.spans}
        known = {index: self._known_chunks(index, chunks) for index in serving}
        missing = {index: [d for d in embeds if d not in self._engines[index].embeds] for index in serving}

        def cost(index: int) -> int:
            start = known[index] * CHUNK_TOKENS
            # Positions that a cached prefix covers need no embeddings.
            needed = {span.item.digest for span in request.spans if span.stop > start}
            encoding = sum(_ITEM_TOKENS + _EMBED_TOKENS * embeds[d] for d in missing[index] if d in needed)
            return max(1, len(request.token_ids) - start) + encoding

        costs = {index: cost(index) for index in serving}
        # Among equals the one that was sent least, so that the caches of all are used.
        chosen = min(
            self._not_overloaded(serving, costs),
            key=lambda i: (costs[i], self._engines[i].load, self._engines[i].num_routed, i),
        )
        self._count(known, missing, embeds, chosen)
        self._remember(self._engines[chosen], chunks, embeds)
        self._engines[chosen].load += costs[chosen] + _SEQUENCE_TOKENS
        self._engines[chosen].num_routed += 1
        self._engines[chosen].num_requests += 1
        return Route(chosen, costs[chosen])

    def computed(self, route: Route) -> None:
        """The prompt of a routed request is computed: it has its first token."""
        self._engines[route.engine].load -= route.tokens

    def ended(self, route: Route, *, computed: bool) -> None:
        """A routed request has ended, before or after `computed`."""
        self._engines[route.engine].load -= _SEQUENCE_TOKENS + (0 if computed else route.tokens)
        self._engines[route.engine].num_requests -= 1

    def load(self, engine: int) -> int:
        """Tokens that the engine must compute, and what its running sequences count for."""
        return self._engines[engine].load

    def forget(self, engine: int) -> None:
        """The engine's caches are lost; the load is that of its requests and ends with them."""
        memory = self._engines[engine]
        memory.chunks.clear()
        memory.embeds.clear()
        memory.num_embeds = 0

    def forget_prefixes(self) -> None:
        """The prefix caches of all engines are cleared."""
        for memory in self._engines:
            memory.chunks.clear()

    def _not_overloaded(self, serving: Collection[int], costs: dict[int, int]) -> list[int]:
        """The engines that are not far busier than the one with the fewest requests or the one with the least load.

        An engine may be ahead by what it saves a request: until then, waiting there costs less than computing
        elsewhere what it has. In requests it may be so at most by as many again, because what many of them have in
        common is computed elsewhere once for all.
        """
        requests = {index: self._engines[index].num_requests for index in serving}
        loads = {index: self._engines[index].load for index in serving}
        most_requests = min(requests.values()) * _MAX_RATIO + _MAX_REQUESTS_AHEAD
        most_load = min(loads.values()) * _MAX_RATIO + _MAX_STEPS_AHEAD * self._step_tokens
        dearest = max(costs.values())
        saved = {index: dearest - costs[index] for index in serving}
        kept = [
            index
            for index in serving
            if requests[index] <= most_requests + min(_MAX_REQUESTS_AHEAD, saved[index] // _SEQUENCE_TOKENS)
            and loads[index] <= most_load + saved[index]
        ]
        # The engine with the fewest requests may have the greatest load.
        return kept or [min(serving, key=lambda index: loads[index])]

    def _known_chunks(self, engine: int, chunks: list[int]) -> int:
        """How many chunks from the start of a prompt the engine should have."""
        known = self._engines[engine].chunks
        for number, chunk in enumerate(chunks):
            if chunk not in known:
                return number
        return len(chunks)

    def _count(
        self, known: dict[int, int], missing: dict[int, list[bytes]], embeds: dict[bytes, int], chosen: int
    ) -> None:
        stats = self.stats
        stats.num_requests += 1
        for digest in embeds:
            if any(digest not in lost for lost in missing.values()):
                stats.num_repeated += 1
                stats.num_found += digest not in missing[chosen]
        stats.prefix_tokens += max(known.values()) * CHUNK_TOKENS
        stats.found_tokens += known[chosen] * CHUNK_TOKENS

    def _remember(self, memory: _Memory, chunks: list[int], embeds: dict[bytes, int]) -> None:
        # The last chunk first: a prefix is found only together with what stands before it.
        for chunk in reversed(chunks):
            memory.chunks[chunk] = None
            memory.chunks.move_to_end(chunk)
        while len(memory.chunks) > _MAX_REMEMBERED:
            memory.chunks.popitem(last=False)
        for digest, count in embeds.items():
            memory.num_embeds += count - memory.embeds.pop(digest, 0)
            memory.embeds[digest] = count
        while memory.num_embeds > self._max_embeds and len(memory.embeds) > 1:
            _, count = memory.embeds.popitem(last=False)
            memory.num_embeds -= count


def _chunks(request: Request) -> Iterator[int]:
    """The hash of a prompt up to the end of each of its whole chunks, with the media that begin there.

    Hashes that collide send a request to an engine that lacks its prefix, and change no answer.
    """
    lora = None if request.lora is None else request.lora.lora_int_id
    key: Hashable = (request.salt, lora)
    spans = list(request.spans)
    ids = request.token_ids
    for stop in range(CHUNK_TOKENS, min(len(ids), _MAX_CHUNKS * CHUNK_TOKENS) + 1, CHUNK_TOKENS):
        start = stop - CHUNK_TOKENS
        begun = []
        while spans and spans[0].start < stop:
            begun.append(spans.pop(0).item.digest)
        key = hash((key, ids[start:stop], *begun))
        yield key
