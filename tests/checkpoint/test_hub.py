"""Of a hub repository, what is missing is fetched, nothing else is, and what cannot be fetched is named."""

from __future__ import annotations

import errno
import json
import logging
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from beheld import LLM, SamplingParams
from beheld.checkpoint.resolve import fetch_weights, pull, resolve, resolve_tokenizer
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.families import registry
from tests import tiny, tiny_gguf
from tests.checkpoint.hubs import COMMIT, Hub

NAME = "owner/model"
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
INDEX = {"weight_map": {f"layers.{number}": shard for number, shard in enumerate(SHARDS)}}
READ = {
    "config.json": {"model_type": "llava", "vision_config": {"hidden_size": 8}},
    "generation_config.json": {"eos_token_id": 2},
    "preprocessor_config.json": {"size": 14},
    "tokenizer.json": {"version": "1.0"},
    "tokenizer_config.json": {"model_max_length": 64},
    "chat_template.jinja": b"{{ messages }}",
}
SHARDED = {**READ, "model.safetensors.index.json": INDEX, **dict.fromkeys(SHARDS, b"weights")}
OTHER_FORMS = {
    "README.md": b"A model.",
    "assets/sample.mp4": b"frames",
    "consolidated.safetensors": b"weights",
    "flax_model.msgpack": b"weights",
    "model.gguf": b"weights",
    "onnx/model.onnx": b"weights",
    "onnx/model.onnx_data": b"weights",
    "original/consolidated.00.pth": b"weights",
    "pytorch_model.bin": b"weights",
    "rust_model.ot": b"weights",
    "tf_model.h5": b"weights",
    "training_args.bin": b"notes",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("beheld.utils.log._said", set())
    hub = Hub(tmp_path / "hub")
    hub.enter(monkeypatch)
    return hub


def take(args: EngineArgs) -> Path:
    """Resolve the model and fetch its weights, as an engine does."""
    path = resolve(args)
    fetch_weights(args, path)
    return path


def test_a_fresh_machine_fetches_what_is_read_then_the_weights(hub: Hub) -> None:
    hub.publish(NAME, {**SHARDED, **OTHER_FORMS})
    args = EngineArgs(NAME)
    path = resolve(args)
    assert path == hub.folder(NAME)
    assert sorted(hub.fetched) == sorted({*READ, "model.safetensors.index.json"})
    fetch_weights(args, path)
    assert hub.cached(NAME) == sorted(SHARDED)
    # The revision, and the list of files once.
    assert hub.questions == 2
    hub.forget()
    hub.online = False
    assert take(args) == path
    assert (hub.fetched, hub.questions) == ([], 0)


@pytest.mark.parametrize("before", [("config.json",), ("config.json", "tokenizer.json", "tokenizer_config.json")])
def test_what_another_program_left_of_a_repository_is_completed(hub: Hub, before: tuple[str, ...]) -> None:
    hub.publish(NAME, {**SHARDED, **OTHER_FORMS})
    hub.lay(NAME, *before)
    take(EngineArgs(NAME))
    assert hub.cached(NAME) == sorted(SHARDED)
    assert sorted(hub.fetched) == sorted({*SHARDED} - {*before})


def test_a_processor_is_not_there_because_the_weights_are(hub: Hub) -> None:
    """transformers' own loading of a model leaves neither processor nor tokenizer."""
    hub.publish(NAME, SHARDED)
    hub.lay(NAME, "config.json", "generation_config.json", "model.safetensors.index.json", *SHARDS, "tokenizer.json")
    take(EngineArgs(NAME))
    assert sorted(hub.fetched) == ["chat_template.jinja", "preprocessor_config.json", "tokenizer_config.json"]


def test_a_whole_repository_from_elsewhere_asks_nothing(hub: Hub) -> None:
    hub.publish(NAME, SHARDED)
    hub.lay(NAME, *SHARDED)
    take(EngineArgs(NAME))
    assert (hub.fetched, hub.questions) == ([], 0)


def test_a_library_of_the_hub_that_keeps_no_lists(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 takes releases from before there were any."""
    import huggingface_hub.errors

    monkeypatch.delattr(huggingface_hub.errors, "CachedRepoTreeNotFoundError")
    hub.publish(NAME, SHARDED)
    hub.lay(NAME, *(file for file in SHARDED if file != SHARDS[1]))
    take(EngineArgs(NAME))
    assert hub.fetched == [SHARDS[1]]
    hub.forget()
    take(EngineArgs(NAME))
    assert (hub.fetched, hub.questions) == ([], 0)


def test_a_missing_shard_is_fetched_alone(hub: Hub) -> None:
    hub.publish(NAME, SHARDED)
    hub.lay(NAME, *(file for file in SHARDED if file != SHARDS[1]))
    take(EngineArgs(NAME))
    assert hub.fetched == [SHARDS[1]]


def test_a_download_that_was_interrupted_goes_on(hub: Hub) -> None:
    hub.publish(NAME, SHARDED)
    path = take(EngineArgs(NAME))
    (path / SHARDS[2]).unlink()
    hub.forget()
    take(EngineArgs(NAME))
    assert (hub.fetched, hub.questions) == ([SHARDS[2]], 0)


@pytest.mark.parametrize("known", [False, True], ids=["laid", "list of files known"])
def test_without_a_network_the_missing_shard_is_named(hub: Hub, known: bool) -> None:
    hub.publish(NAME, SHARDED)
    if known:
        resolve(EngineArgs(NAME))
    hub.lay(NAME, *(file for file in SHARDED if file != SHARDS[1]))
    hub.online = False
    with pytest.raises(ModelError) as caught:
        take(EngineArgs(NAME))
    said = str(caught.value)
    assert SHARDS[1] in said
    assert SHARDS[0] not in said
    assert f"hf download {NAME}" in said


def test_without_a_network_a_tokenizer_in_the_cache_is_no_model(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.publish(NAME, SHARDED)
    hub.lay(NAME, "config.json", "tokenizer.json", "tokenizer_config.json")
    hub.online = False
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match=r"lacks weights.*model\.safetensors"):
        take(EngineArgs(NAME))
    # Random weights need none of it, and a configuration can be read.
    assert take(EngineArgs(NAME, load_format="dummy")) == hub.folder(NAME)


def test_without_a_network_what_a_list_says_is_missing_is_spoken_of(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.publish(NAME, SHARDED)
    path = take(EngineArgs(NAME))
    (path / "preprocessor_config.json").unlink()
    hub.online = False
    with caplog.at_level(logging.WARNING):
        assert take(EngineArgs(NAME)) == path
    (said,) = caplog.messages
    assert "lacks preprocessor_config.json, " in said


def test_random_weights_fetch_none(hub: Hub) -> None:
    hub.publish(NAME, SHARDED)
    take(EngineArgs(NAME, load_format="dummy"))
    assert not {*hub.fetched} & {*SHARDS}


def test_a_repository_of_bin_alone_is_fetched_with_them(hub: Hub) -> None:
    """Notes of a trainer and another framework's weights beside them are not."""
    shards = {f"pytorch_model-0000{number}-of-00002.bin": b"weights" for number in (1, 2)}
    index = {"pytorch_model.bin.index.json": {"weight_map": dict(zip("ab", shards, strict=True))}}
    hub.publish(NAME, {**READ, **shards, **index, "training_args.bin": b"", "tf_model.h5": b""})
    take(EngineArgs(NAME))
    assert hub.cached(NAME) == sorted({**READ, **shards, **index})
    hub.publish("owner/one", {**READ, "pytorch_model.bin": b"weights", "training_args.bin": b""})
    take(EngineArgs("owner/one"))
    assert hub.cached("owner/one") == sorted({*READ, "pytorch_model.bin"})


def test_a_whole_file_goes_before_shards_and_bin(hub: Hub) -> None:
    hub.publish(NAME, {**SHARDED, **OTHER_FORMS, "model.safetensors": b"weights"})
    take(EngineArgs(NAME))
    assert {file for file in hub.fetched if file.endswith((".safetensors", ".bin"))} == {"model.safetensors"}


def test_weights_of_a_publishers_own_layout_are_none_of_transformers(hub: Hub) -> None:
    hub.publish(NAME, {**READ, "params.json": {"dim": 8}, "consolidated.safetensors": b"weights"})
    with pytest.raises(ModelError, match="no weights that transformers' classes read"):
        take(EngineArgs(NAME))
    assert "consolidated.safetensors" not in hub.fetched


def test_adapters_in_folders_of_their_own_come_along(hub: Hub) -> None:
    adapter = {"vision-lora/adapter_config.json": {"r": 4}, "vision-lora/adapter_model.safetensors": b"weights"}
    hub.publish(NAME, {**SHARDED, **adapter})
    path = take(EngineArgs(NAME))
    assert {*adapter} <= {*hub.cached(NAME)}
    (path / "vision-lora" / "adapter_model.safetensors").unlink()
    hub.forget()
    take(EngineArgs(NAME))
    assert hub.fetched == ["vision-lora/adapter_model.safetensors"]


def test_of_a_tokenizers_repository_nothing_else_is_fetched(hub: Hub) -> None:
    files = {
        "config.json": {},
        "tokenizer.json": {},
        "vocab.json": {},
        "merges.txt": b"",
        "special_tokens_map.json": {},
    }
    weights = {"model.safetensors": b"weights", "model.safetensors.index.json": INDEX}
    hub.publish("owner/words", {**files, **OTHER_FORMS, **weights, "preprocessor_config.json": {}})
    args = EngineArgs(NAME, tokenizer="owner/words")
    path = resolve_tokenizer(args, Path("elsewhere"))
    assert path == hub.folder("owner/words")
    assert hub.cached("owner/words") == sorted(files)
    hub.forget()
    hub.online = False
    assert resolve_tokenizer(args, Path("elsewhere")) == path
    assert (hub.fetched, hub.questions) == ([], 0)


def test_a_tokenizer_that_is_half_there_is_completed_or_named(hub: Hub) -> None:
    hub.publish("owner/words", {"config.json": {}, "vocab.json": {}, "merges.txt": b""})
    hub.lay("owner/words", "config.json")
    args = EngineArgs(NAME, tokenizer="owner/words")
    hub.online = False
    with pytest.raises(ModelError, match="'owner/words'"):
        resolve_tokenizer(args, Path("elsewhere"))
    hub.online = True
    resolve_tokenizer(args, Path("elsewhere"))
    assert hub.cached("owner/words") == ["config.json", "merges.txt", "vocab.json"]
    hub.publish("owner/mute", {"config.json": {}, "model.safetensors": b"weights"})
    with pytest.raises(ModelError, match="holds no tokenizer"):
        resolve_tokenizer(EngineArgs(NAME, tokenizer="owner/mute"), Path("elsewhere"))


def test_a_model_that_has_no_definition_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    hub.publish(NAME, {**SHARDED, "config.json": {"model_type": "unheard_of", "architectures": ["UnheardOf"]}})
    with pytest.raises(ModelError, match="unheard_of"):
        LLM(NAME)
    assert not {*hub.fetched} & {*SHARDS}


def test_a_script_that_asks_for_the_tokenizer_first(hub: Hub) -> None:
    from transformers import AutoTokenizer

    files = {file.name: file.read_bytes() for file in tiny.checkpoint("qwen2_vl").iterdir()}
    hub.publish(NAME, {**files, **OTHER_FORMS})
    words = [name for name in files if name.startswith(("tokenizer", "config"))]
    hub.lay(NAME, *words)
    assert AutoTokenizer.from_pretrained(NAME, revision=COMMIT, cache_dir=hub.cache, local_files_only=True)
    prompt = {"prompt": tiny.prompt("qwen2_vl", 1), "multi_modal_data": {"image": tiny.picture(56, 56, 1)}}
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    answers = []
    for model in (NAME, str(tiny.checkpoint("qwen2_vl"))):
        with LLM(model, dtype="float32") as llm:
            answers.append(llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert sorted(hub.fetched) == sorted({*files} - {*words})


def test_a_wrong_option_is_told_of_before_the_weights_are_fetched(hub: Hub) -> None:
    files = {file.name: file.read_bytes() for file in tiny.checkpoint("qwen2_vl").iterdir()}
    hub.publish(NAME, files)
    with pytest.raises(ConfigError, match="max_pixles"):
        LLM(NAME, mm_processor_kwargs={"max_pixles": 5})
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(NAME, max_model_len=10**9)
    assert not [file for file in hub.fetched if file.endswith(".safetensors")]


def test_a_short_name_is_its_repository(hub: Hub) -> None:
    short = next(iter(registry.short_names().values()))
    hub.publish(short.repository, SHARDED)
    assert resolve(EngineArgs(model=short.name.upper())) == hub.folder(short.repository)


def test_a_folder_goes_before_a_short_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(registry.short_names()))
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve(EngineArgs(model=name)) == Path(name)


def test_a_name_that_is_nearly_a_short_name(hub: Hub) -> None:
    name = next(iter(registry.short_names()))
    with pytest.raises(ModelError, match=f"Did you mean '{name}'"):
        resolve(EngineArgs(model=name + "x"))


def test_pulling_tells_the_licence_and_checks_hashes(hub: Hub) -> None:
    hub.publish(NAME, SHARDED)
    hub.cards[NAME] = {"license": "apache-2.0"}
    told: list[str] = []
    folder = pull(EngineArgs(model=NAME), told.append)
    assert folder == hub.folder(NAME)
    assert set(hub.fetched) == set(SHARDED)
    assert told == [f"{NAME}, licence: apache-2.0", f"{len(SHARDED)} files have the hashes that the hub states."]
    hub.cards[NAME] = {"license": "other", "license_name": "model-terms"}
    told.clear()
    pull(EngineArgs(model=NAME), told.append)
    assert told[0].endswith("licence: model-terms")


@pytest.mark.parametrize("file", ["tokenizer.json", SHARDS[1]])
def test_a_file_that_was_damaged_is_named(hub: Hub, file: str) -> None:
    hub.publish(NAME, SHARDED)
    pull(EngineArgs(model=NAME), print)
    path = hub.folder(NAME) / file
    content = hub.folder(NAME).parents[1] / "blobs" / "content"
    content.parent.mkdir(exist_ok=True)
    content.write_bytes(b"damaged")
    path.unlink()
    path.symlink_to(content)
    with pytest.raises(ModelError, match=f"not what the hub states: {file}"):
        pull(EngineArgs(model=NAME), print)
    # The library links a content that is there again, so removing the link alone changed nothing.
    assert not content.exists()
    hub.forget()
    pull(EngineArgs(model=NAME), print)
    assert hub.fetched == [file]


def test_what_a_user_s_own_link_leads_to_stays(hub: Hub, tmp_path: Path) -> None:
    hub.publish(NAME, SHARDED)
    pull(EngineArgs(model=NAME), print)
    path, own = hub.folder(NAME) / SHARDS[1], tmp_path / "tuned.safetensors"
    own.write_bytes(b"tuned")
    path.unlink()
    path.symlink_to(own)
    with pytest.raises(ModelError, match="not what the hub states"):
        pull(EngineArgs(model=NAME), print)
    assert own.read_bytes() == b"tuned"
    assert not path.is_symlink()


def _answered(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (_answered(RepositoryNotFoundError, 404), "has no repository of this name", "Did you mean 'owner/model'?"),
        (_answered(GatedRepoError, 403), "it is gated", "Accept its terms on the hub's page of owner/modle"),
        (_answered(RevisionNotFoundError, 404), "no such revision", "Give a branch"),
        (_answered(HfHubHTTPError, 503), "the hub answered 503", "Try again later."),
        (_answered(HfHubHTTPError, 403), "the hub answered 403", "log in"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full", "Make room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full", "Make room"),
        (
            PermissionError(errno.EACCES, "denied", "/cache/x"),
            "'/cache/x' may not be written",
            "Change its permissions",
        ),
        (LocalTokenNotFoundError("no key"), "it asks for a key", "HF_TOKEN"),
        (socket.gaierror(-3, "Temporary failure"), "the hub's address cannot be found", "Check the network"),
        (ConnectionRefusedError(111, "refused"), "or to a proxy before it, is refused", "Check the network"),
        (TimeoutError("timed out"), "does not answer in time", "Check the network"),
        (httpx.ConnectError("refused"), r"no usable answer \(ConnectError\)", "Check the network"),
        (OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE keeps the network off", "Unset it"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_hub_answers_is_told_apart(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, remedy: str
) -> None:
    """A misspelt name, a gated repository, a full disk and a missing network had one and the same remedy."""
    short = SimpleNamespace(repository="owner/model")
    monkeypatch.setattr(registry, "short_names", lambda: {"model": short})
    asked: list[str] = []

    def answer(*_: object, **__: object) -> None:
        asked.append("")
        raise error

    for name in ("repo_info", "model_info"):
        monkeypatch.setattr(HfApi, name, answer)
    for attempt in (lambda args: pull(args, print), resolve):
        with pytest.raises(ModelError, match=reason) as caught:
            attempt(EngineArgs(model="owner/modle"))
        assert remedy in caught.value.remedy
    assert len(asked) == 2


def test_what_is_on_this_machine_is_not_pulled(hub: Hub) -> None:
    with pytest.raises(ModelError, match="is on this machine"):
        pull(EngineArgs(model=str(tiny.checkpoint("qwen2"))), print)
    hub.online = False
    with pytest.raises(ModelError, match="cannot be asked"):
        pull(EngineArgs(model=NAME), print)


def test_a_gguf_file_is_named_by_its_type(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "made"))
    content = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf").read_bytes()
    names = ("small-Q4_0.gguf", "small-Q4_K_M.gguf", "small-Q8_0.gguf", "sub/small.F16.gguf", "README.md")
    hub.publish("owner/small-GGUF", dict.fromkeys(names, content))
    args = EngineArgs(model="owner/small-GGUF:q4_k_m")
    path = resolve(args)
    fetch_weights(args, path)
    assert hub.fetched == ["small-Q4_K_M.gguf"]
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen2"
    hub.online = False
    assert resolve(args) == path
    hub.online = True
    assert resolve(EngineArgs(model="owner/small-GGUF:F16")) != path
    with pytest.raises(ModelError, match="no GGUF file whose name ends with 'Q5_K'") as caught:
        resolve(EngineArgs(model="owner/small-GGUF:Q5_K"))
    assert "small-Q4_0" in str(caught.value)
    hub.publish("owner/seeing-GGUF", {"a-Q4_0.gguf": content, "mmproj-a-BF16.gguf": b"", "mmproj-a-F16.gguf": b"GGUF"})
    hub.forget()
    with pytest.raises(ModelError, match=r"mmproj-a-F16\.gguf cannot be read"):
        resolve(EngineArgs(model="owner/seeing-GGUF:Q4_0"))
    assert sorted(hub.fetched) == ["a-Q4_0.gguf", "mmproj-a-F16.gguf"]
    assert resolve(EngineArgs(model="owner/seeing-GGUF:Q4_0", mmproj=""))
    hub.publish("owner/two-GGUF", {"a-Q4_0.gguf": content, "b-Q4_0.gguf": content})
    with pytest.raises(ModelError, match="several files"):
        resolve(EngineArgs(model="owner/two-GGUF:Q4_0"))
