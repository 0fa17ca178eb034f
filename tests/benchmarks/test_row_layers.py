"""How a profile of next tokens is cut and added up."""

from __future__ import annotations

from benchmarks import row_layers


def test_a_kernels_time_ends_with_it_and_all_add_up() -> None:
    """Kernels that start early overlap: what counts is how far the end moves."""
    events = [("a", 0.0, 4.0), ("b", 1.0, 6.0), ("c", 2.0, 5.0), ("a", 7.0, 9.0)]
    made = row_layers.by_kernel(events)
    assert made[0] == ("a", 7.0, 6.0, 2)
    assert sorted(made[1:]) == [("b", 1.0, 5.0, 1), ("c", 1.0, 3.0, 1)]
    assert sum(own for _, own, _, _ in made) == 9.0
    assert row_layers.by_kernel([]) == []


def test_steps_end_at_what_comes_once_a_token() -> None:
    tokens = row_layers._PROFILED_TOKENS
    prompt = ["prompt", "layer", "prompt", "layer", "head"]
    names = prompt + ["layer", "layer", "head"] * tokens + ["copy"]
    found = [(name, float(at), float(at + 1)) for at, name in enumerate(names)]
    ends = row_layers.step_ends(found)
    assert [found[at][0] for at in ends] == ["head"] * tokens
    assert len(found[ends[0] + 1 : ends[-1] + 1]) == 3 * (tokens - 1)
    assert row_layers.step_ends(found[:4]) == [-1, 3]
