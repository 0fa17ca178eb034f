"""Captures a ladder of steps as graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch

from beheld.core.errors import first_line
from beheld.platform.platform import Graph, Platform

Size = TypeVar("Size")
Out = TypeVar("Out")


class NotCapturedError(RuntimeError):
    """A step does something that no graph can hold; the message is the device's."""


def capture(
    sizes: Sequence[Size],
    step: Callable[[Size], Out],
    *,
    platform: Platform,
    before: Callable[[Size], None] | None = None,
    first: Collection[Size] = (),
    long: Collection[Size] = (),
    show_progress: bool,
    name: str,
) -> dict[Size, tuple[Graph, Out]]:
    """One graph for each size, with its outputs, which stay valid until the next replay of any of the graphs.

    Args:
        sizes: the largest first, so that the others fit into its memory.
        step: launches the work of a size, on tensors that stay in place.
        platform: of the device; it has graphs.
        before: makes what a size reads fit to be computed.
        first: further sizes to try before any is captured, because they take another path through the model.
        long: sizes that are not tried: that takes longer than what it saves their first use.
        show_progress: show a bar.
        name: what the bar says is captured.

    Raises:
        NotCapturedError: a step does what no graph can hold, such as bringing numbers from the host.
    """
    if show_progress:
        from tqdm import tqdm

        sizes = tqdm(sizes, desc=f"Capturing {name}")
    graphs = platform.graphs
    assert graphs is not None
    pool = graphs.new_pool()
    made: dict[Size, tuple[Graph, Out]] = {}
    with torch.inference_mode(), graphs.on(graphs.new_stream()):
        for size in sizes:
            if before is not None:
                before(size)
            # What is compiled or chosen in the first pass, a choice between kernels by their times say, cannot be
            # captured. Later sizes only load kernels that are compiled for them, which a relaxed capture allows.
            if not made or size in first:
                step(size)
            # An error of what was launched before is not the step's.
            platform.synchronize()
            try:
                with graphs.recording(pool, relaxed=True) as graph:
                    out = step(size)
            except RuntimeError as error:
                raise NotCapturedError(first_line(error)) from error
            if size not in long:
                # The first replay takes the graph to the device; it works on padding.
                graph.replay()
            made[size] = (graph, out)
        platform.synchronize()
    # What the first passes took on this stream is of no use to any other.
    platform.empty_cache()
    return made
