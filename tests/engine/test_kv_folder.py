"""Two engines with one folder: the second computes only what the first has not kept, and answers the same."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.core.errors import BeheldError, ConfigError
from beheld.core.kv_transfer import KVTransferConfig
from beheld.core.outputs import RequestOutput
from tests import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 256, "block_size": 4, "media_workers": 0}
PROMPT = {"prompt_token_ids": [*range(10, 55)]}


def transfer(folder: Path, role: str = "kv_both", **more: Any) -> dict[str, Any]:
    """The option, as a mapping."""
    extra = {"shared_storage_path": str(folder), **more.pop("extra", {})}
    return {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra, **more}


def ask(prompts: list[Any], model: str | Path = "", folder: Path | None = None, **options: Any) -> list[RequestOutput]:
    """What a new engine answers."""
    if folder is not None:
        options = {"kv_transfer_config": transfer(folder), **options}
    with LLM(str(model or tiny.checkpoint("llama")), **OPTIONS | options) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def taken(outputs: list[RequestOutput]) -> list[tuple[int, int]]:
    return [(output.num_cached_tokens, output.num_external_tokens) for output in outputs]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_another_engine_computes_only_the_rest(family: str, overlap: bool, tmp_path: Path) -> None:
    options = {"model": tiny.checkpoint(family), "async_scheduling": overlap}
    alone = ask([PROMPT], **options)
    assert not files(tmp_path)
    first = ask([PROMPT], folder=tmp_path, **options)
    assert len(files(tmp_path)) == 11
    second = ask([PROMPT], folder=tmp_path, **options)
    assert ids(alone) == ids(first) == ids(second)
    assert (taken(first), taken(second)) == ([(0, 0)], [(44, 44)])


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_other_forms_of_keys_and_values(kv_dtype: str, tmp_path: Path) -> None:
    if kv_dtype == "int8" and torch.cuda.is_available():
        pytest.skip("int8 is a CPU's")
    first = ask([PROMPT], folder=tmp_path, kv_cache_dtype=kv_dtype)
    second = ask([PROMPT], folder=tmp_path, kv_cache_dtype=kv_dtype)
    assert ids(first) == ids(second)
    assert taken(second) == [(44, 44)]
    # Of another type nothing fits.
    assert taken(ask([PROMPT], folder=tmp_path)) == [(0, 0)]


def test_a_longer_prompt_takes_what_it_has_in_common(tmp_path: Path) -> None:
    ask([PROMPT], folder=tmp_path)
    longer = [{"prompt_token_ids": [*range(10, 40), *range(60, 90)]}]
    found = ask(longer, folder=tmp_path)
    assert taken(found) == [(28, 28)]
    assert ids(found) == ids(ask(longer))


def test_pictures_are_part_of_what_a_block_is(tmp_path: Path) -> None:
    model = tiny.checkpoint("qwen2_vl")

    def prompt(seed: int) -> dict[str, Any]:
        text = tiny.prompt("qwen2_vl", 1, 0, "What is in it? Say it in a few words.")
        return {"prompt": text, "multi_modal_data": {"image": tiny.picture(56, 56, seed)}}

    alone = ask([prompt(1), prompt(2)], model)
    ask([prompt(1)], model, tmp_path)
    same, other = ask([prompt(1), prompt(2)], model, tmp_path)
    assert ids([same, other]) == ids(alone)
    pad = json.loads((model / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    first, start = (other.prompt_token_ids or []).index(pad), len(same.prompt_token_ids or ()) - 5
    assert same.num_cached_tokens >= start, "the picture is among the positions that were taken"
    # What they have in common is read once, or for each.
    assert same.num_external_tokens >= start - first
    assert other.num_cached_tokens <= first, "what precedes the picture is all that they share"


BREAK = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "changed": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "text": lambda file: file.write_text("no block"),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("how", [*BREAK, "another's"])
def test_a_file_that_cannot_be_used_is_computed_and_written_anew(how: str, tmp_path: Path) -> None:
    alone = ask([PROMPT], folder=tmp_path)
    held = {file: file.read_bytes() for file in files(tmp_path)}
    for file in held:
        if how == "another's":
            shutil.copy(next(other for other in held if other != file), f"{file}.copy")
            os.replace(f"{file}.copy", file)
        else:
            BREAK[how](file)
    found = ask([PROMPT], folder=tmp_path)
    assert ids(found) == ids(alone)
    assert taken(found) == [(0, 0)]
    # All but the first, which alone was read, and the others stay where nobody has looked at them.
    again = ask([PROMPT], folder=tmp_path)
    assert ids(again) == ids(alone)
    assert again[0].num_external_tokens >= 4


def test_a_file_that_cannot_be_used_may_end_its_request(tmp_path: Path) -> None:
    ask([PROMPT], folder=tmp_path)
    for file in files(tmp_path):
        BREAK["cut"](file)
    other = {"prompt_token_ids": [*range(60, 90)]}
    option = transfer(tmp_path, kv_load_failure_policy="fail")
    failed, fine = ask([PROMPT, other], kv_transfer_config=option)
    assert isinstance(failed.error, BeheldError)
    assert "was cut" in str(failed.error)
    assert ids([fine]) == ids(ask([other]))


def test_another_model_takes_nothing(tmp_path: Path) -> None:
    """Its configuration and shapes are the same, and one weight differs."""
    from safetensors.torch import load_file, save_file

    model = tiny.checkpoint("llama")
    ask([PROMPT], model, tmp_path)
    tuned = tmp_path / "tuned"
    shutil.copytree(model, tuned)
    weights = load_file(tuned / "model.safetensors")
    weights[min(weights)].view(-1)[0] += 1
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    assert taken(ask([PROMPT], tuned, tmp_path)) == [(0, 0)]
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert taken(ask([PROMPT], copy, tmp_path)) == [(44, 44)], "where a checkpoint lies does not matter"
    changed = {"rope_theta": 20_000.0}
    assert taken(ask([PROMPT], model, tmp_path, hf_overrides=changed)) == [(0, 0)]


def test_roles(tmp_path: Path) -> None:
    ask([PROMPT], kv_transfer_config=transfer(tmp_path, "kv_consumer"))
    assert not files(tmp_path)
    ask([PROMPT], kv_transfer_config=transfer(tmp_path, "kv_producer"))
    assert files(tmp_path)
    assert taken(ask([PROMPT], kv_transfer_config=transfer(tmp_path, "kv_producer"))) == [(0, 0)]
    assert taken(ask([PROMPT], kv_transfer_config=transfer(tmp_path, "kv_consumer"))) == [(44, 44)]


def test_preemption_and_small_steps(tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": [*range(10 + n, 50 + n)]} for n in range(6)]
    options = {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    alone = ask(prompts)
    assert ids(ask(prompts, folder=tmp_path, **options)) == ids(alone)
    with LLM(
        str(tiny.checkpoint("llama")), **OPTIONS | options, kv_transfer_config=KVTransferConfig(**transfer(tmp_path))
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats().scheduler
    assert [row[:8] for row in ids(outputs)] == ids(alone)
    assert stats.num_preemptions > 0
    assert stats.external_hits == 6 * 36


def test_a_bound(tmp_path: Path) -> None:
    ask([PROMPT], folder=tmp_path)
    size = files(tmp_path)[0].stat().st_size
    shutil.rmtree(tmp_path)
    most = 20 * size
    option = transfer(tmp_path, extra={"max_bytes": most})
    prompts = [{"prompt_token_ids": [*range(n, n + 40)]} for n in range(10, 50)]
    ask(prompts, kv_transfer_config=option)
    assert 15 * size < sum(file.stat().st_size for file in files(tmp_path)) <= most
    last = ask(prompts[-1:], kv_transfer_config=option)
    assert taken(last) == [(36, 36)], "those that were used last are there"


def test_several_engines_at_once(tmp_path: Path) -> None:
    """Engines in processes, which end by themselves, and one in a thread."""
    prompts = [{"prompt_token_ids": [*range(10 + n, 50 + n)]} for n in range(8)]

    async def answer(llm: AsyncLLM, prompt: Any) -> RequestOutput:
        async for output in llm.generate(prompt, GREEDY):
            last = output
        return last

    async def run(engine: str, **options: Any) -> list[RequestOutput]:
        model = str(tiny.checkpoint("llama"))
        async with AsyncLLM(model, engine=engine, **OPTIONS, kv_transfer_config=transfer(tmp_path), **options) as llm:
            return list(await asyncio.gather(*(answer(llm, prompt) for prompt in prompts)))

    async def both() -> tuple[list[RequestOutput], list[RequestOutput]]:
        return await asyncio.gather(run("process"), run("thread"))

    alone = ids(ask(prompts))
    one, two = asyncio.run(both())
    assert ids(one) == ids(two) == alone
    assert len(files(tmp_path)) == 80
    assert not list(tmp_path.rglob("*.part"))
    assert [number for _, number in taken(asyncio.run(run("process", data_parallel_size=2)))] == [36] * 8


def test_weights_that_are_worthless_are_kept_nowhere(tmp_path: Path) -> None:
    async def run() -> list[int]:
        option = transfer(tmp_path)
        async with AsyncLLM(str(tiny.checkpoint("llama")), **OPTIONS, kv_transfer_config=option) as llm:
            counts = []
            for _ in range(2):
                async for _ in llm.generate(PROMPT, GREEDY):
                    pass
                await asyncio.sleep(0.2)
                counts.append(len(files(tmp_path)))
                shutil.rmtree(tmp_path, ignore_errors=True)
                await llm.reset_weights()
            await llm.reload_weights()
            async for _ in llm.generate(PROMPT, GREEDY):
                pass
        counts.append(len(files(tmp_path)))
        return counts

    assert asyncio.run(run()) == [11, 0, 11]


OWN = """
from beheld.kvstore.connector import SharedStorageConnector

class Choosy(SharedStorageConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return min(count, 32), later

class Unlucky(SharedStorageConnector):
    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        slots = connector_metadata.requests[0].slot_mapping
        self._wrong = {int(slots[20]) // self._block_size}

    def get_block_ids_with_load_errors(self):
        return self._wrong

class Faulty(SharedStorageConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        raise RuntimeError("no idea")

class Other:
    pass
"""


@pytest.mark.parametrize(("name", "count"), [("Choosy", 32), ("Unlucky", 20), ("Faulty", 0)])
def test_a_connector_of_ones_own_decides_what_is_taken(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_connectors.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = ask([PROMPT], folder=tmp_path)
    option = transfer(tmp_path, kv_connector_module_path="own_connectors") | {"kv_connector": name}
    found = ask([PROMPT], kv_transfer_config=option)
    assert ids(found) == ids(first)
    assert taken(found) == [(count, count)]
    failed = ask([PROMPT], kv_transfer_config=option | {"kv_load_failure_policy": "fail"})
    assert (failed[0].error is None) == (name == "Choosy")


@pytest.mark.parametrize(
    ("name", "path", "match"),
    [
        ("Other", "own_connectors", "does not derive from SharedStorageConnector"),
        ("Chosy", "own_connectors", "no 'Chosy'.*Choosy"),
        ("Choosy", "no_connectors", "cannot be imported"),
    ],
)
def test_a_connector_that_is_none_is_refused(
    name: str, path: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_connectors.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    option = transfer(tmp_path, kv_connector_module_path=path) | {"kv_connector": name}
    with pytest.raises(ConfigError, match=match):
        ask([PROMPT], kv_transfer_config=option)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "NixlConnector.*not available.*ExampleConnector"),
        ({"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, "names no shared_storage_path"),
        ({"kv_connector": "ExampleConnector"}, "kv_role is missing"),
        ({"kv_connector": "ExampleConnector", "kv_role": "both"}, "no kv_role 'both'.*kv_consumer"),
        ({"kv_conector": "ExampleConnector"}, "kv_conector.*kv_connector"),
        (transfer(Path("x"), kv_load_failure_policy="ignore"), "no kv_load_failure_policy 'ignore'"),
        (transfer(Path("x"), extra={"max_bytes": 0}), "max_bytes"),
        (transfer(Path("/proc/no/folder")), "cannot be used"),
        ("{", "not JSON"),
        (3, "must be a mapping"),
    ],
)
def test_what_cannot_be_is_refused(option: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ask([PROMPT], kv_transfer_config=option)


@pytest.mark.parametrize(
    ("family", "options", "match"),
    [
        ("gemma2", {}, "layers that do not keep something of each position"),
        ("qwen3_next", {}, "layers that do not keep something of each position"),
        ("llama", {"enable_prefix_caching": False}, "prefix caching is off"),
        ("llama", {"load_format": "dummy"}, "no checkpoint"),
    ],
)
def test_models_for_which_it_is_not_built(family: str, options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        ask([PROMPT], tiny.checkpoint(family), tmp_path, **options)


def test_without_a_way_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ask([PROMPT], kv_transfer_config=KVTransferConfig())
    assert not list(tmp_path.iterdir())


def test_entries_for_other_ways_are_named() -> None:
    given = KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both", kv_rank=0, kv_port=1, engine_id="one", kv_ip="127.0.0.1"
    )
    assert given.without_effect() == ["kv_rank", "kv_port"]
