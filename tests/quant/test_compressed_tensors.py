"""FP8 checkpoints mean what their numbers and scales say; whatever else is quantized is refused by name."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import decide
from beheld.models.load import load_model
from beheld.quant import cache_scales, compressed_tensors
from beheld.quant.compressed_tensors import Dequantized, open_weights
from beheld.quant.method import StorageTarget
from tests import tiny, tiny_quantized

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense family with an older layout of names, with scales in float32; its embeddings are its head."""
    path = tmp_path_factory.mktemp("dense")
    tiny_quantized.quantize(tiny.checkpoint("qwen2_5_vl"), path, "float32")
    return path


@pytest.fixture
def copied(dense: Path, tmp_path: Path) -> Path:
    """One to be changed."""
    shutil.copytree(dense, tmp_path / "copied")
    return tmp_path / "copied"


def load(path: Path, dtype: str = "float32", **options: Any) -> Any:
    args = EngineArgs(model=str(path), dtype=dtype, **options)
    config = read_config(path, args)
    info = read_info(path, args, config)
    return load_model(config, info, decide(args, info)).target.model


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the weights of a checkpoint."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def restate(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the configuration of a checkpoint says."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    change(config)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def same(path: Path, dtype: str) -> None:
    """Every parameter is bit for bit that of the plain twin, in the type asked for."""
    found, meant = (dict(load(p, dtype).named_parameters()) for p in (path, path / tiny_quantized.PLAIN))
    assert found.keys() == meant.keys()
    for name, value in found.items():
        assert value.dtype == meant[name].dtype, name
        # transformers 5.24 keeps what chooses experts in float32.
        assert value.dtype == getattr(torch, dtype) or name.endswith("mlp.gate.weight"), name
        assert torch.equal(value, meant[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_weights_are_those_meant(dense: Path, dtype: str) -> None:
    same(dense, dtype)


def test_experts_are_merged_with_their_own_scales() -> None:
    path = tiny.checkpoint("glm4v_moe_fp8")
    scales = [value for name, value in load_file(path / "model.safetensors").items() if ".experts.1.up_proj" in name]
    assert any(value.dtype == torch.float8_e4m3fn for value in scales)
    same(path, "bfloat16")


def test_few_dequantized_weights_live_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Dequantized.__getitem__
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(weight: Dequantized, index: Any) -> torch.Tensor:
        tensor = read(weight, index)
        alive.append(sum(other() is not None for other in made))
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Dequantized, "__getitem__", watched)
    model = load(tiny.checkpoint("glm4v_moe_fp8"), "bfloat16")
    assert len(made) == 45
    # The loader reads with a few threads.
    assert max(alive) < 8
    assert not any(tensor() is not None for tensor in made)
    del model


def test_one_scale_for_a_whole_weight(copied: Path) -> None:
    plain = load_file(copied / "model.safetensors")[QUERY].float() * 0.25
    for shape in ((), (1,)):
        rewrite(copied, lambda weights, shape=shape: weights.update({f"{QUERY}_scale": torch.full(shape, 0.25)}))
        assert torch.equal(open_weights(copied, "cpu")[QUERY][...], plain)
        assert torch.equal(open_weights(copied, "cpu")[QUERY][3:5, :2], plain[3:5, :2])


def test_several_files(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    # A weight and its scale need not lie in one file; a file that the index does not name is not the model's.
    parts = {"a.safetensors": lambda name: name.endswith("_scale"), "b.safetensors": lambda n: not n.endswith("_scale")}
    for file, takes in parts.items():
        save_file({name: value for name, value in weights.items() if takes(name)}, copied / file)
    save_file({QUERY: torch.zeros(1)}, copied / "z.safetensors")
    where = {name: file for file, takes in parts.items() for name in weights if takes(name)}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    same(copied, "float32")


def test_scales_of_activations_are_left_out(copied: Path) -> None:
    rewrite(copied, lambda weights: weights.update({QUERY.replace("weight", "input_scale"): torch.ones(1)}))
    same(copied, "float32")


def test_scales_of_keys_and_values_are_left_out_and_it_is_told(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = QUERY.removesuffix("q_proj.weight")
    scales = {attention + name: torch.full((1,), 0.5) for name in ("k_scale", "v_scale", "k_proj.output_scale")}
    rewrite(copied, lambda weights: weights.update(scales))
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    restate(copied, lambda config: config["quantization_config"].update(kv_cache_scheme=scheme))
    said: list[str] = []
    monkeypatch.setattr(cache_scales, "once", lambda logger, level, message: said.append(message))
    same(copied, "float32")
    assert said[0].startswith("The checkpoint asks for keys and values in fewer bits.")
    stated = json.loads((copied / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    found = compressed_tensors.make(stated, StorageTarget("cpu", torch.float32)).weights(copied)
    assert found is not None
    assert not scales.keys() & found.keys()


def test_it_is_said_once(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compressed_tensors.logger, "warning", lambda form, *given: said.append(form % given))
    load(dense)
    assert len(said) == 1
    assert said[0].startswith("FP8 weights are dequantized as they are loaded, because this device has no products")


def test_it_may_be_stated_for_the_text_alone(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("glm4v_moe_fp8"), tmp_path / "copied")
    restate(
        tmp_path / "copied",
        lambda config: config["text_config"].update(quantization_config=config.pop("quantization_config")),
    )
    same(tmp_path / "copied", "float32")


def test_the_option_may_name_what_the_checkpoint_is(dense: Path) -> None:
    load(dense, quantization="compressed-tensors")
    with pytest.raises(ConfigError, match="the checkpoint is not quantized"):
        load(tiny.checkpoint("llama"), quantization="compressed-tensors")


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
@pytest.mark.parametrize("method", ["aqlm", "hqq", None])
def test_another_method_is_refused_by_name(copied: Path, place: str, method: str | None) -> None:
    def change(config: dict[str, Any]) -> None:
        own = config.pop("quantization_config") | {"quant_method": method}
        config |= {place: {**config.get(place, {}), "quantization_config": own} if place == "text_config" else own}

    restate(copied, change)
    with pytest.raises(ModelError, match=f"quantized by {method!r}"):
        load(copied)


UNBUILT: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "format": (lambda own, weights: own.update(format="pack-quantized"), "'pack-quantized'"),
    "format of a group": (
        lambda own, w: own["config_groups"]["group_0"].update(format="nvfp4-pack-quantized"),
        "nvfp4",
    ),
    "sparse": (lambda own, weights: own.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "transforms": (lambda own, weights: own.update(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    "integers": (lambda own, weights: weights.update(type="int"), "type 'int'"),
    "four bits": (lambda own, weights: weights.update(num_bits=4), "num_bits 4"),
    "blocks": (lambda own, weights: weights.update(strategy="block"), "strategy 'block'"),
    "zero points": (lambda own, weights: weights.update(symmetric=False), "symmetric False"),
    "no groups": (lambda own, weights: own.update(config_groups={}), "no config_groups"),
}


@pytest.mark.parametrize("name", UNBUILT)
def test_another_form_is_refused_by_name(copied: Path, name: str) -> None:
    change, reason = UNBUILT[name]

    def apply(config: dict[str, Any]) -> None:
        own = config["quantization_config"]
        change(own, own["config_groups"]["group_0"]["weights"])

    restate(copied, apply)
    with pytest.raises(ModelError, match=reason):
        load(copied)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scale": (lambda weights: weights.pop(f"{QUERY}_scale"), "has no 'model.layers.0.self_attn.q_proj.weight_scale"),
    "no weight": (lambda weights: weights.pop(QUERY), "for a weight that is not FP8"),
    "another type": (lambda weights: weights.update({QUERY: weights[QUERY].to(torch.float8_e5m2)}), "is not FP8"),
    "blocks": (lambda weights: weights.update({f"{QUERY}_scale": torch.ones(2, 2)}), r"shape \[2, 2\]"),
    "across": (lambda weights: weights.update({f"{QUERY}_scale": torch.ones(1, 64)}), r"shape \[1, 64\]"),
    "none at all": (
        lambda weights: [weights.update({n: weights[n].float()}) or weights.pop(f"{n}_scale") for n in fp8(weights)],
        "but none of the weights is",
    ),
}


def fp8(weights: dict[str, Any]) -> list[str]:
    return [name for name, value in weights.items() if value.dtype == torch.float8_e4m3fn]


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(copied: Path, name: str) -> None:
    change, reason = BROKEN[name]
    rewrite(copied, change)
    with pytest.raises(ModelError, match=reason):
        load(copied)


def index(path: Path, text: str) -> None:
    """Let an index name the weights, as it does where they are several files."""
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def test_an_index_next_to_a_whole_file_is_not_read(copied: Path) -> None:
    # transformers' loader takes the whole file then, and so do the checks of files and of memory.
    (copied / "model.safetensors.index.json").write_text("{", encoding="utf-8")
    same(copied, "float32")


_LOADER = "could not be loaded"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda path: (path / "model.safetensors").write_bytes(b"\x10\0\0"), _LOADER),
    "a file that is not there": (
        lambda path: index(path, json.dumps({"weight_map": {QUERY: "gone.safetensors"}})),
        "1 are missing: gone.safetensors",
    ),
    "an index cut short": (lambda path: index(path, "{"), "model.safetensors.index.json cannot be read"),
    "groups in a list": (
        lambda path: restate(path, lambda c: c["quantization_config"].update(config_groups=["Linear"])),
        _LOADER,
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_an_error_with_a_remedy(copied: Path, name: str) -> None:
    change, reason = DAMAGED[name]
    change(copied)
    with pytest.raises(ModelError, match=rf"{reason}.*Fetch the checkpoint again"):
        load(copied)
