"""POST /weight_checker and /collective_rpc: what the weights are, all of them zero, and read again from their files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import ranks, tiny
from tests.server.running import ENGINE, Running
from tests.server.test_rank_kills import RANKS

CHECK, CALL = "/weight_checker", "/collective_rpc"
BODY: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny.checkpoint("llama"), tmp_path_factory.mktemp("weights") / "llama"))


@pytest.fixture(scope="module", params=["thread", "process", "two engines"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    several = {"data_parallel_size": 2, "engine": "process"}
    place = several if request.param == "two engines" else {"engine": request.param}
    made = Running(folder, ENGINE | place, operator_routes=True)
    yield made
    made.close()


def checksums(running: Running) -> dict[str, str]:
    found: dict[str, str] = running.post(CHECK, {"action": "checksum"}).json()["checksums"]
    return found


def said(running: Running) -> str:
    return str(running.post("/v1/completions", BODY).json()["choices"][0]["text"])


def test_digests_are_stable_and_differences_are_named(served: Running) -> None:
    known = checksums(served)
    engines = max(1, len(served.llm.engine_reports()))
    assert {name.split(":")[0] for name in known} == {f"dp{number}" for number in range(engines)}
    assert all(re.fullmatch(r"dp\d:pp0:pcp0:tp0:[\w.]+", name) for name in known)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in known.values())
    assert checksums(served) == known
    assert served.post(CHECK, {"action": "compare", "baseline": known}).json() == {"match": True, "mismatches": []}
    changed, missing, *_ = known
    other = {name: digest for name, digest in known.items() if name != missing} | {changed: "0" * 64, "more": "0"}
    found = served.post(CHECK, {"action": "compare", "baseline": other}).json()
    assert found == {"match": False, "mismatches": sorted([changed, missing, "more"])}


@pytest.mark.parametrize("paused", [False, True])
def test_weights_that_were_reset_are_read_again(served: Running, paused: bool) -> None:
    known, text = checksums(served), said(served)
    if paused:
        assert served.post("/pause", None).status_code == 200
    assert served.post(CHECK, {"action": "reset"}).json() == {"status": "reset"}
    found = served.post(CHECK, {"action": "compare", "baseline": known}).json()
    assert found == {"match": False, "mismatches": sorted(known)}
    assert served.get("/is_paused").json() == {"is_paused": paused}
    if not paused:
        # A model of zeros likes all tokens as much, and takes the first.
        assert (
            served.post("/v1/completions", BODY | {"return_token_ids": True}).json()["choices"][0]["token_ids"]
            == [0] * 8
        )
    assert served.post(CALL, {"method": "reload_weights"}).json() == {"results": [None]}
    assert served.post(CHECK, {"action": "compare", "baseline": known}).json()["match"]
    if paused:
        assert served.get("/is_paused").json() == {"is_paused": True}
        assert served.post("/resume", None).status_code == 200
    assert said(served) == text


def test_other_files_are_other_weights(served: Running, folder: Path) -> None:
    """A trainer has written into the folder meanwhile."""
    known, text = checksums(served), said(served)
    file = folder / "model.safetensors"
    before = file.read_bytes()
    weights = load_file(file)
    try:
        changed = {name: value.flip(0) if name == "lm_head.weight" else value for name, value in weights.items()}
        # Files that are mapped are not written into.
        file.unlink()
        save_file(changed, file, metadata={"format": "pt"})
        served.post(CALL, {"method": "reload_weights"})
        found = served.post(CHECK, {"action": "compare", "baseline": known}).json()["mismatches"]
        assert {name.partition("tp0:")[2].split(".")[0] for name in found} == {"lm_head"}
        assert said(served) != text
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(before)
        served.post(CALL, {"method": "reload_weights"})
    assert served.post(CHECK, {"action": "compare", "baseline": known}).json()["match"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHECK, {}, "action"),
        (CHECK, {"action": "frobnicate"}, "action"),
        (CHECK, {"action": "compare"}, "baseline"),
        (CHECK, {"action": "compare", "baseline": {"a": 1}}, "baseline.a"),
        (CHECK, [], None),
        (CALL, {"method": "apply_model"}, "method"),
        (CALL, {"method": "reload_weights", "args": [1]}, "args"),
    ],
)
def test_what_is_wrong_is_told(served: Running, path: str, body: Any, param: str | None) -> None:
    refused = served.post(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_a_sleeping_engine_has_none_to_tell(served: Running) -> None:
    assert served.post("/sleep?level=1", None).status_code == 200
    try:
        for action in ("checksum", "reset"):
            refused = served.post(CHECK, {"action": action})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable"), refused.text
    finally:
        assert served.post("/wake_up", None).status_code == 200


def test_each_rank_tells_its_own_and_none_is_reset() -> None:
    with ranks.forked():
        shared = Running("llama", RANKS | {"tensor_parallel_size": 2}, operator_routes=True)
        try:
            known = checksums(shared)
            assert {name.rpartition(":")[0] for name in known} == {"dp0:pp0:pcp0:tp0", "dp0:pp0:pcp0:tp1"}
            refused = shared.post(CHECK, {"action": "reset"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tensor_parallel_size")
            assert checksums(shared) == known
            assert shared.post("/v1/completions", BODY).status_code == 200
        finally:
            shared.close()
