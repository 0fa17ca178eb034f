"""Logits processors of an installed package: scripts that import vllm and the server load them by themselves."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from beheld.cli import serve
from beheld.cli.flags import engine_options
from beheld.compat.installed import GROUP, with_installed
from beheld.compat.llm import ScriptLLM
from beheld.core.errors import ConfigError
from tests import tiny
from tests.pool import checkpoints

ROOT = Path(__file__).parents[2]
PLUGIN = """
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

class Only(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        wanted = (params.extra_args or {}).get("only")
        if wanted is None:
            return None

        def change(output_ids, logits):
            kept = logits[wanted].clone()
            logits[:] = float("-inf")
            logits[wanted] = kept
            return logits

        return change
"""
SCRIPT = """
import sys
{imports}
def main():
    llm = LLM({model!r}, dtype="float32", max_model_len=64{options})
    common = {{"max_tokens": 4, "temperature": 0, "ignore_eos": True}}
    params = [SamplingParams(**common), SamplingParams(**common, extra_args={{"only": 41}})]
    print([output.outputs[0].token_ids for output in llm.generate(["Hello"] * 2, params, use_tqdm=False)])

if __name__ == "__main__":
    main()
"""


def install(folder: Path, value: str = "only_plugin:Only", text: str = PLUGIN) -> Path:
    """A package as pip lays it."""
    (folder / "only_plugin.py").write_text(text)
    (folder / "only_plugin-1.0.dist-info").mkdir()
    (folder / "only_plugin-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: only-plugin\nVersion: 1.0\n"
    )
    (folder / "only_plugin-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nonly = {value}\n")
    return folder


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    paths = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("options", ["", ', logits_processors=["only_plugin:Only"]'])
def test_a_script_of_vllms_has_it_and_one_of_ours_has_not(tmp_path: Path, options: str) -> None:
    model = str(tiny.checkpoint("llama"))
    given = {"model": model, "options": options}
    theirs = "import beheld.compat.vllm\nfrom vllm import LLM, SamplingParams"
    done = run(install(tmp_path), SCRIPT.format(imports=theirs, **given))
    assert done.returncode == 0, done.stderr
    free, bound = eval(done.stdout.splitlines()[-1])
    assert bound == [41] * 4
    assert free != bound
    assert done.stderr.count("only (only_plugin:Only)") == (0 if options else 1)
    if not options:
        ours = run(tmp_path, SCRIPT.format(imports="from beheld import LLM, SamplingParams", **given))
        assert ours.returncode == 0, ours.stderr
        assert eval(ours.stdout.splitlines()[-1]) == [free, free]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["mote", *words])


SERVER = """
import argparse
from beheld.cli import serve
from beheld.cli.flags import engine_options
from beheld.core.errors import ConfigError

parser = argparse.ArgumentParser()
serve.add_arguments(parser)
def options(*words):
    arguments = parser.parse_args(["mote", *words])
    found = engine_options(arguments, answers=True)
    targets = [getattr(each, "target", each) for each in found["logits_processors"]]
    return serve.place_of(arguments, "mote", found), [getattr(each, "__name__", each) for each in targets]
print(options())
print(options("--logits-processors", "only_plugin:Only"))
for words in (("--engine", "process"), ("--data-parallel-size", "2")):
    try:
        options(*words)
    except ConfigError as error:
        print(error.param, "Only" in error.reason)
"""


def test_a_server_has_it_in_its_own_process(tmp_path: Path) -> None:
    done = run(install(tmp_path), SERVER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "('thread', ['Only'])",
        "('thread', ['only_plugin:Only'])",
        *["logits_processors True"] * 2,
    ]


def test_commands_that_are_not_vllms_have_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    assert "logits_processors" not in engine_options(parsed())


@pytest.mark.parametrize(
    ("value", "text"), [("only_plugin:Gone", PLUGIN), ("only_plugin:Only", "import a_package_that_is_not_there")]
)
def test_what_cannot_be_loaded_is_no_silent_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, text: str
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, value, text)))
    monkeypatch.delitem(sys.modules, "only_plugin", raising=False)
    with pytest.raises(ConfigError, match=f"'{value}' of an installed package .* cannot be loaded") as refused:
        with_installed(None)
    assert (refused.value.param, "uninstall" in refused.value.remedy) == ("logits_processors", True)


def test_without_packages_nothing_changes() -> None:
    assert with_installed(None) is None
    assert with_installed(["a:B"]) == ["a:B"]


NAMED = "beheld.compat.ngram:NGramPerReqLogitsProcessor"
OF_POOLING = "Pooling models do not support custom logits processors"


@pytest.fixture
def embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that pools, where such a package is installed."""
    folder = tmp_path / "model"
    folder.mkdir()
    checkpoints.encoder(folder, "BertModel")
    checkpoints.modules(folder, "Pooling", pooling_mode_mean_tokens=True)
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.syspath_prepend(str(install(package, "only_plugin:Only", "class Only:\n    pass\n")))
    monkeypatch.delitem(sys.modules, "only_plugin", raising=False)
    return str(folder)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_model_that_pools_leaves_it_alone_and_refuses_what_is_asked_for(embedder: str, engines: int) -> None:
    with ScriptLLM(embedder, data_parallel_size=engines) as llm:
        assert len(llm.embed("a text", use_tqdm=False)) == 1
    with pytest.raises(ConfigError, match=OF_POOLING):
        ScriptLLM(embedder, data_parallel_size=engines, logits_processors=[NAMED])


@pytest.mark.parametrize(
    ("words", "fronts"),
    [(["--data-parallel-size", "2"], 1), ([], 2), (["--engine", "process"], 1), (["--device", "gpu"], 1)],
    ids=["two engines", "two fronts", "process", "gpu"],
)
def test_a_server_that_pools_starts_where_it_would_without_the_package(
    embedder: str, words: list[str], fronts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = words[:1] == ["--device"]
    monkeypatch.setattr(serve, "has_accelerator", lambda device: gpu)
    arguments = parsed(*([] if gpu else words))
    options = engine_options(arguments, answers=True)
    assert serve.place_of(arguments, embedder, options, fronts) == "process"
    assert "logits_processors" not in options
    # A model that generates would answer otherwise without it.
    options = engine_options(arguments, answers=True)
    if gpu:
        assert serve.place_of(arguments, "mote", options, fronts) == "thread"
    else:
        with pytest.raises(ConfigError, match="run in the process that takes requests"):
            serve.place_of(arguments, "mote", options, fronts)
    assert len(options["logits_processors"]) == 1
    with pytest.raises(ConfigError, match=OF_POOLING):
        serve.place_of(
            arguments, embedder, options | {"logits_processors": [*options["logits_processors"], NAMED]}, fronts
        )
