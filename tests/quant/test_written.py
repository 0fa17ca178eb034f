"""`beheld quantize`: what is written loads and means the rounded weights; what is spared; refusals; the loss told."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from beheld.checkpoint.info import read_config, read_info
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, UserError
from beheld.models.write_quantized import choose, write
from beheld.quant.written import WrittenForm, int4_form, int8_form
from tests import tiny
from tests.quant.test_compressed_tensors import load

# A weight's greatest error as a share of the largest weight of its tensor.
BOUNDS = {"int8": 0.006, "int4": 0.26, "gptq": 0.6}


def meant(entries: dict[str, torch.Tensor], form: WrittenForm) -> torch.Tensor:
    """The numbers, by the format's specification."""
    if form.group is None:
        return entries["weight"].float() * entries["weight_scale"].float()
    words, (outputs, inputs) = entries["weight_packed"], entries["weight_shape"].tolist()
    numbers = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], -1).flatten(1) - 8
    scales = entries["weight_scale"].float().repeat_interleave(form.group, 1)
    assert numbers.shape == (outputs, inputs)
    return numbers.float() * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [WrittenForm(8, None), WrittenForm(4, 64)], ids=str)
def test_weights_are_the_nearest_numbers(form: WrittenForm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(24, 128) * torch.logspace(-4, 1, 24).unsqueeze(1)).to(dtype)
    weight[3] = 0
    found = meant(form.entries(weight, None), form)
    by_group = weight.float().view(24, -1, form.group or 128)
    scale = (by_group.abs().amax(-1, keepdim=True) / form.most).clamp(min=1e-30)
    nearest = torch.round(by_group / scale) * scale
    errors = [(each.view(by_group.shape) - by_group).square().sum(-1) for each in (found, nearest)]
    # Scales may be rounded to the weights' type.
    assert (errors[0] <= errors[1] * (1.1 if dtype == torch.bfloat16 else 1)).all()
    assert errors[0].sum() < (0.99 if form.bits == 4 else 1.01) * errors[1].sum()
    assert not found[3].any()


@torch.inference_mode()
def test_second_moments_lower_the_error_of_products() -> None:
    torch.manual_seed(0)
    form, weight = WrittenForm(4, 32), torch.randn(48, 256)
    # Inputs that go together, and one that is always zero.
    x = torch.randn(512, 24) @ torch.randn(24, 256) + 0.1 * torch.randn(512, 256)
    x[:, 7] = 0
    nearest, calibrated = (meant(form.entries(weight, moments), form) for moments in (None, x.t() @ x))
    errors = [((each - weight) @ x.t()).norm() for each in (nearest, calibrated)]
    assert errors[1] < 0.6 * errors[0]


def test_groups_divide_the_inputs() -> None:
    assert int4_form([256, 512]).group == 128
    assert int4_form([192, 64, 256]).group == 64
    assert int8_form([17]).group is None
    assert not WrittenForm(4, 64).fits(16, 96)
    with pytest.raises(ModelError, match="NaN"):
        WrittenForm(8, None).entries(torch.full((2, 32), float("nan")), None)


@pytest.mark.parametrize(
    ("family", "method"),
    [("qwen2_5_vl", "int8"), ("qwen2_5_vl", "gptq"), ("qwen2", "gptq-like"), ("qwen2", "int4"), ("glm4v_moe", "int4")],
)
def test_a_written_checkpoint_loads(
    family: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tiny.checkpoint(family), tmp_path / "out"
    command = ["quantize", str(source), str(out), "--method", method, "--json", "--max-tokens", "2"]
    assert main([*command, *(["--question", "Count."] if "gptq" in method else [])]) == 0
    told = json.loads(capsys.readouterr().out)
    stored, was = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    ends = (".weight",) if method == "int8" else (".weight_packed",)
    rounded = [
        name for name in stored if f"{name.removesuffix(ends[0])}.weight_scale" in stored and name.endswith(ends)
    ]
    assert told["layers"] == len(rounded) >= 7
    assert not any("visual" in name or "embed" in name or "lm_head" in name or ".gate." in name for name in rounded)
    assert told["bytes_after"] == sum(tensor.nbytes for tensor in stored.values()) < told["bytes_before"]
    plain = dict(load(source).named_parameters())
    found = dict(load(out).named_parameters())
    assert found.keys() == plain.keys()
    changed = 0
    for name, value in found.items():
        far = float((value.data - plain[name].data).abs().max() / plain[name].data.abs().max())
        assert far <= BOUNDS[method.removesuffix("-like")], name
        changed += far > 0
    assert 0 < changed < len(found)
    assert was.keys() - stored.keys() == (
        {name.replace("_packed", "") for name in rounded} if method != "int8" else set()
    )
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert not any(name.removesuffix(ends[0]) in config["ignore"] for name in rounded)
    assert any("visual" in name for name in config["ignore"]) == ("v" in family)


def test_verify_tells_what_a_written_checkpoint_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(tiny.checkpoint("qwen2")), str(tmp_path / "out")
    assert main(["quantize", source, out, "--method", "int8"]) == 0
    assert main(["verify", out, "--unquantized", source, "--json", "--max-tokens", "6"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(told["kl"]) == 6
    assert 0 < max(told["kl"]) < 0.05


def copied(family: str, folder: Path) -> tuple[Any, Any]:
    """What is read of a checkpoint's copy, with the folders that some checkpoints have."""
    shutil.copytree(tiny.checkpoint(family), folder)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    for name, text in {
        "modules.json": json.dumps(modules),
        "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
        "additional_chat_templates/rag.jinja": "{{ messages }}",
        "onnx/model.onnx": "large, and another program's",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    args = EngineArgs(model=str(folder), device="cpu")
    config = read_config(folder, args)
    return read_info(folder, args, config), config


def test_a_pooling_checkpoint_keeps_its_modules_and_templates(tmp_path: Path) -> None:
    info, config = copied("qwen2", tmp_path / "source")
    write(info, choose(info, config, "int8"), out := tmp_path / "out", lambda layer: None)
    again = read_info(out, args := EngineArgs(model=str(out), device="cpu"), read_config(out, args))
    assert again.pooler == info.pooler is not None
    assert (out / "additional_chat_templates/rag.jinja").is_file()
    assert not (out / "onnx").exists()


def test_what_fails_half_way_leaves_no_folder(tmp_path: Path) -> None:
    def fails(layer: str) -> torch.Tensor:
        raise ModelError("The model cannot answer.")

    info, config = copied("qwen2", tmp_path / "source")
    with pytest.raises(ModelError, match="cannot answer"):
        write(info, choose(info, config, "gptq"), tmp_path / "out", fails)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def read(family: str) -> tuple[object, ...]:
        args = EngineArgs(model=str(tiny.checkpoint(family)), device="cpu")
        config = read_config(tiny.checkpoint(family), args)
        return read_info(tiny.checkpoint(family), args, config), config

    with pytest.raises(UserError, match="are quantized"):
        choose(*read("glm4v_moe_fp8"), "int8")  # type: ignore[arg-type]
    info, config = read("qwen2")
    with pytest.raises(UserError, match="exists already"):
        write(info, choose(info, config, "int8"), tmp_path, lambda layer: None)  # type: ignore[arg-type]
    assert main(["quantize", str(tiny.checkpoint("qwen2")), str(tmp_path / "out"), "--method", "gptq"]) == 1


def test_the_log_is_quiet_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []

    def noting(*given: Any) -> Any:
        levels.append(logging.getLogger("beheld").level)
        raise UserError("This is enough.")

    monkeypatch.setenv("BEHELD_LOG_LEVEL", "")
    monkeypatch.setattr("beheld.tools.quantize.choose", noting)
    for options in ((), ("--verbose",)):
        assert (
            main(["quantize", str(tiny.checkpoint("qwen2")), str(tmp_path / "out"), "--method", "int8", *options]) == 1
        )
    assert levels == [logging.WARNING, logging.INFO]
