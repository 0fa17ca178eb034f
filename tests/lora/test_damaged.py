"""Damaged and hostile adapters are refused soon, in words that name the file and the remedy, or fit and are finite."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from beheld.core.errors import LoRAError
from beheld.lora.load import CONFIG, PATTERNS_S, WEIGHTS, Form, LoRAWeights, Site, load
from tests.checkpoint.test_generated_damage import HOSTILE, damage, damages, places
from tests.long import sized

pytestmark = pytest.mark.case(123)

_MOST_S = 5.0
_SHAPES = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (32, 16), "mlp.down_proj": (48, 32)}
_SITES = {f"layers.{n}.{name}": Site(f"layers.{n}.{name}", *shape) for n in range(3) for name, shape in _SHAPES.items()}
_FORM = Form(_SITES, ("model.language_model.", "model."), 8, torch.float32)
_HEALTHY = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj", "down_proj"],
    "base_model_name_or_path": "someone/model",
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {"k_proj": 4},
    "init_lora_weights": True,
    "lora_dropout": 0.1,
}


def healthy(folder: Path) -> Path:
    """A folder with an adapter that fits."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, site in _SITES.items():
        for which, shape in (("A", (4, site.num_inputs)), ("B", (site.num_outputs, 4))):
            tensors[f"base_model.model.model.language_model.{name}.lora_{which}.weight"] = torch.ones(shape)
    (folder / CONFIG).write_text(json.dumps(_HEALTHY))
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def tried(folder: Path) -> LoRAWeights | LoRAError:
    """What loading gives, soon."""
    # Not of the clock: other processes may take it.
    begin = time.thread_time()
    try:
        found: LoRAWeights | LoRAError = load("mine", str(folder), _FORM)
    except LoRAError as error:
        found = error
    assert time.thread_time() - begin < _MOST_S
    return found


def check(found: LoRAWeights | LoRAError) -> None:
    """It is a clear refusal, or an adapter that can be used."""
    if isinstance(found, LoRAError):
        text = str(found)
        assert "'mine'" in text
        assert CONFIG in text or WEIGHTS in text, text
        assert found.remedy or found.or_engine, text
        assert len(text) < 1000
    else:
        for down_rI, up_Or in found.matrices.values():
            assert down_rI.isfinite().all()
            assert up_Or.isfinite().all()


def header(path: Path) -> dict[str, Any]:
    """What the file of the weights says that it holds."""
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def with_header(path: Path, entries: Any) -> None:
    """Say something else of the same bytes."""
    data, text = path.read_bytes(), json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])


@st.composite
def adapter_damages(draw: Callable[[st.SearchStrategy[Any]], Any], folder: Path) -> tuple[str, str, Any]:
    """As `damages`, and kinds "header" and "number" of the weights."""
    kind = draw(st.sampled_from(["file", "file", "header", "number"]))
    if kind == "file":
        found: tuple[str, str, Any] = draw(damages(folder))
        return found
    if kind == "header":
        return WEIGHTS, kind, (draw(st.sampled_from(places(header(folder / WEIGHTS)))), draw(st.sampled_from(HOSTILE)))
    value = draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, 1e-45]))
    return WEIGHTS, kind, (draw(st.integers(1, 500)), value)


def damage_adapter(folder: Path, file: str, kind: str, what: Any) -> None:
    """Do it."""
    path = folder / file
    if kind == "header":
        (*outer, last), value = what
        entries = inner = header(path)
        for name in outer:
            inner = inner[name]
        inner[last] = value
        with_header(path, entries)
    elif kind == "number":
        place, value = what
        data = path.read_bytes()
        end = len(data) - 4 * place
        path.write_bytes(data[:end] + struct.pack("<f", value) + data[end + 4 :])
    else:
        damage(folder, file, kind, what)


def test_a_damaged_adapter_is_refused_or_fits(tmp_path: Path) -> None:
    whole = healthy(tmp_path / "healthy")
    assert isinstance(tried(whole), LoRAWeights)
    refused: list[bool] = []

    @settings(
        max_examples=sized(80, 5000),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(adapter_damages(whole))
    def attempt(given_: tuple[str, str, Any]) -> None:
        folder = healthy(tmp_path / "adapter")
        damage_adapter(folder, *given_)
        found = tried(folder)
        check(found)
        refused.append(isinstance(found, LoRAError))

    attempt()
    assert sum(refused) > len(refused) // 3
    assert sum(refused) < len(refused)


def _config(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: bool((folder / CONFIG).write_text(json.dumps(_HEALTHY | entries))) and None


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: with_header(folder / WEIGHTS, change(header(folder / WEIGHTS)))


def _pipe(file: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return replace


def _huge(entries: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in entries if name != "__metadata__")
    return entries | {name: entries[name] | {"shape": [1 << 40, 1 << 20]}}


_SLOW = "(?:.|.)*[A-Z]"
HOSTILE_ADAPTERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pattern that backtracks": (_config(rank_pattern={_SLOW: 4}), "rank_pattern"),
    "another": (_config(alpha_pattern={"(?:[a-z_.0-9]|[a-z_.0-9])+[A-Z]": 4}), "alpha_pattern"),
    "many patterns": (_config(alpha_pattern={f".*{n}.*!": 4 for n in range(50_000)}), "alpha_pattern"),
    "a rank of ten digits": (_config(r=10**9), "max_lora_rank"),
    "a rank of forty digits": (_config(r=10**40), "max_lora_rank"),
    "a scale of nothing": (_config(lora_alpha=float("nan")), CONFIG),
    "a type of a megabyte": (_config(peft_type="x" * 900_000), "peft_type"),
    "a start of a megabyte": (_config(init_lora_weights="x" * 900_000), "init_lora_weights"),
    "a field of a megabyte": (_config(**{"x" * 900_000: 1}), CONFIG),
    "a configuration that never comes": (_pipe(CONFIG), CONFIG),
    "weights that never come": (_pipe(WEIGHTS), WEIGHTS),
    "a tensor of exabytes": (_header(_huge), WEIGHTS),
    "a key of a megabyte": (_header(lambda entries: entries | {"x" * 900_000: next(iter(entries.values()))}), WEIGHTS),
    "many tensors of nothing": (
        _header(
            lambda entries: {f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(30_000)}
        ),
        WEIGHTS,
    ),
}


@pytest.mark.parametrize("name", HOSTILE_ADAPTERS)
def test_hostile_adapters_are_refused_soon(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PATTERNS_S <= 1.0
    monkeypatch.setattr("beheld.lora.load.PATTERNS_S", 0.1)
    folder = healthy(tmp_path)
    spoil, words = HOSTILE_ADAPTERS[name]
    spoil(folder)
    found = tried(folder)
    check(found)
    assert isinstance(found, LoRAError)
    assert words in str(found)


def test_a_list_of_many_targets_is_compared_soon(tmp_path: Path) -> None:
    folder = healthy(tmp_path)
    _config(target_modules=[f"{n}" for n in range(100_000)] + ["q_proj"])(folder)
    assert isinstance(tried(folder), LoRAWeights)


def test_patterns_choose_layers_as_peft_does(tmp_path: Path) -> None:
    folder = healthy(tmp_path)
    _config(alpha_pattern={r"layers\.1\..*_proj": 16, "q_proj": 2, "1.self_attn.k_proj": 1})(folder)
    found = tried(folder)
    assert isinstance(found, LoRAWeights)
    scales = {name: float(up_Or[0, 0]) for name, (_, up_Or) in found.matrices.items()}
    assert scales["layers.1.self_attn.q_proj"] == scales["layers.1.self_attn.k_proj"] == 4.0
    assert scales["layers.0.self_attn.q_proj"] == 0.5
    assert scales["layers.0.self_attn.k_proj"] == 2.0
