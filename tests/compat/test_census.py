"""What vLLM offers and beheld does not is listed with a reason; what is covered is not listed."""

from __future__ import annotations

from pathlib import Path

from tests.compat import census


def test_each_name_is_covered_or_has_a_reason() -> None:
    theirs: dict[str, set[str]] = {}
    for kinds in census.kept_names().values():
        for kind, names in kinds.items():
            theirs.setdefault(kind, set()).update(names)
    told = census.reasons()
    absent = census.missing(theirs, census.our_names())
    for kind, names in absent.items():
        assert sorted(told.get(kind, {})) == names, f"{kind}: tests/compat/not_covered.json"
        # A sentence that says why, or what there is instead.
        assert [reason for reason in told.get(kind, {}).values() if len(reason.split()) < 6 or reason[-1] != "."] == []
    assert set(told) <= set(theirs)
    assert absent["EngineArgs"] == []


def test_the_names_of_a_source(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    sources = {
        "__init__.py": '__all__ = ["LLM"]\nclass Inner: pass',
        "engine/arg_utils.py": "class EngineArgs:\n model: str\n _own: int\nclass AsyncEngineArgs: log: bool",
        "entrypoints/mixin.py": "class Mixin:\n def beam(self): 1\n def _x(self): 1",
        "entrypoints/llm.py": "class LLM(Mixin):\n def chat(self): 1",
        "entrypoints/api.py": '@router.post("/v1/x/{name}")\n@app_router.get(\n    "/y",\n)\ndef f(): ...',
        "sampling_params.py": "class SamplingParams: n: int\nclass StructuredOutputsParams: json: str",
        "pooling_params.py": "class PoolingParams: task: str",
        "outputs.py": "class CompletionOutput: text: str\nclass RequestOutput:\n def __init__(self, prompt, *, x=1): 1",
    }
    modules = (f"{module.replace('.', '/')}.py" for module in census._IMPORTED)
    for path in (*modules, *sources):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(sources.get(path, "def helper(): ..."), encoding="utf-8")
    for source in (tmp_path, package):
        found = census.names_of(source)
        assert found["EngineArgs"] == {"model", "log"}
        assert found["LLM"] == {"beam", "chat"}
        assert {"vllm.LLM", "vllm.inputs.helper"} <= found["imports"]
        assert "vllm.Inner" not in found["imports"]
        assert found["routes"] == {"/v1/x/{}", "/y"}
        assert found["RequestOutput"] == {"prompt", "x"}
