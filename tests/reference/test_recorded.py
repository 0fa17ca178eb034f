"""Our greedy answers equal those that another implementation gave on the same checkpoint: tests/reference/outputs.

Each file names the implementation and its version. To record one again:

    python -m tests.reference.prepare FAMILY FOLDER
    OTHER/bin/python tests/reference/record_vllm.py FOLDER tests/reference/outputs/FAMILY.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from tests import tiny
from tests.long import LONG
from tests.oracle import cases as oracle_cases
from tests.oracle import test_oracle
from tests.reference.cases import asks

OUTPUTS = Path(__file__).parent / "outputs"
FAMILIES = sorted(path.stem for path in OUTPUTS.glob("*.json"))
# With prompts that are cut, all families are compared with transformers in tests/oracle.
ENGINES = ("roomy", "cut") if LONG else ("roomy",)
TOLERANCE = 1e-4


def recorded(family: str) -> dict[str, Any]:
    """Return what the other implementation said."""
    found: dict[str, Any] = json.loads((OUTPUTS / f"{family}.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module", params=[(family, name) for family in FAMILIES for name in ENGINES], ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    """Yield a family and an engine on its tiny checkpoint."""
    family, name = request.param
    with test_oracle.make(family, oracle_cases.options(family, name)) as llm:
        yield family, llm


def test_equals_the_other_implementation(engine: tuple[str, LLM]) -> None:
    family, llm = engine
    told = recorded(family)
    requests = {name: ask for name, ask in asks(family).items() if name in told["cases"]}
    assert requests.keys() == told["cases"].keys(), "a recorded case is no longer asked"
    params = [
        SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=1)
        for ask in requests.values()
    ]
    prompts = [test_oracle.request(family, ask) for ask in requests.values()]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for name, output in zip(requests, outputs, strict=True):
        expected, got = told["cases"][name], output.outputs[0]
        if "prompt_token_ids" in expected:
            assert list(output.prompt_token_ids) == expected["prompt_token_ids"], name
        assert list(got.token_ids) == expected["token_ids"], name
        said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
        assert said == pytest.approx(expected["logprobs"], abs=told.get("tolerance", TOLERANCE)), name


def test_every_recorded_family_is_made_here() -> None:
    assert set(FAMILIES) <= set(tiny.TINY)
