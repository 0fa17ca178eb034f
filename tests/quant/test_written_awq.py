"""`beheld quantize --method awq`: AWQ's layout, and scales of inputs that are folded without changing the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld.cli.main import main
from beheld.models import activation_scales
from beheld.quant.written import WrittenForm
from beheld.quant.written_awq import AWQForm, best_scales
from tests import tiny
from tests.quant.test_compressed_tensors import load


def meant(entries: dict[str, torch.Tensor], group: int) -> torch.Tensor:
    """The numbers (N, K), by the layout's specification."""
    numbers = {}
    for part in ("qweight", "qzeros"):
        words = entries[part]
        found = torch.empty(words.shape[0], words.shape[1] * 8)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found[:, output::8] = (words >> (4 * place)) & 15
        numbers[part] = found
    zeros, scales = (each.repeat_interleave(group, 0) for each in (numbers["qzeros"], entries["scales"].float()))
    return ((numbers["qweight"] - zeros) * scales).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_stored_in_the_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(24, 256) * torch.logspace(-3, 1, 24).unsqueeze(1) + 0.01).to(dtype)
    weight[3] = 0
    form = AWQForm(64)
    found = form.entries(weight, None)
    assert {name: (list(part.shape), part.dtype) for name, part in found.items()} == {
        "qweight": ([256, 3], torch.int32),
        "qzeros": ([4, 3], torch.int32),
        "scales": ([4, 24], torch.float16),
    }
    numbers = meant(found, 64)
    assert torch.equal(numbers, form.nearest(weight.float()))
    by_group = weight.float().view(24, 4, 64)
    step = (by_group.amax(-1).clamp(min=0) - by_group.amin(-1).clamp(max=0)) / 15
    far = (numbers.view(24, 4, 64) - by_group).abs().amax(-1)
    # Ranges may be shrunk by a quarter.
    assert (far <= 4.4 * step + 1e-6).all()
    assert not numbers[3].any()
    symmetric = WrittenForm(4, 64)
    scales = symmetric.entries(weight, None)["weight_scale"].float()
    words = symmetric.entries(weight, None)["weight_packed"]
    other = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], -1).flatten(1) - 8
    other = other * scales.repeat_interleave(64, 1)
    assert (numbers - weight).square().sum() < (other - weight).square().sum()


@torch.inference_mode()
def test_scales_lower_the_error_of_products_with_large_inputs() -> None:
    torch.manual_seed(0)
    form, weight = AWQForm(32), torch.randn(48, 256)
    x = torch.randn(300, 256)
    x[:, ::37] *= 30
    size = x.abs().mean(0)
    scale = best_scales(form, [weight[:20], weight[20:]], x, size)
    errors = [((form.nearest(weight * by) / by - weight) @ x.t()).norm() for by in (torch.ones(256), scale)]
    assert errors[1] < 0.7 * errors[0]
    assert scale[37] > 2 * scale[36]
    # Inputs of one size need none.
    assert torch.equal(best_scales(form, [weight], x, torch.ones(256)), torch.ones(256))


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "gemma3"])
def test_a_written_checkpoint_loads(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    search, change = activation_scales._kept, activation_scales.changes
    monkeypatch.setattr(activation_scales, "_kept", lambda *given: made.append(search(*given)) or made[-1])
    monkeypatch.setattr(activation_scales, "changes", lambda *given: made.append(change(*given)) or made[-1])
    source, out, plain = tiny.checkpoint(family), tmp_path / "out", tmp_path / "plain"
    command = ["quantize", str(source), str(out), "--method", "awq", "--question", "Count.", "--max-tokens", "4"]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    folds, changes = made
    stored, was = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    rounded = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    assert said["layers"] == len(rounded) >= 7
    # Two norms of each decoder layer, whose weights stand for one more in Gemma.
    folded = {fold.source for fold in folds if not fold.by_rows}
    layers = [name for name, _ in load(source).named_modules() if name.endswith(".input_layernorm")]
    assert len(folded) == 2 * len(layers)
    assert all(fold.plus == (family == "gemma3") for fold in folds if not fold.by_rows)
    # The numbers are those of the scaled weights; what is not rounded is changed, or stays.
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["quant_method"], config["bits"], config["version"]) == ("awq", 4, "gemm")
    assert not any(name in config["modules_to_not_convert"] for name in rounded)
    form = AWQForm(config["group_size"])
    scaled = {name: changes[name](value) if name in changes else value for name, value in was.items()}
    for name in rounded:
        entries = {part: stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
        assert torch.equal(meant(entries, form.group), form.nearest(scaled[f"{name}.weight"].float())), name
    kept = was.keys() - {f"{name}.weight" for name in rounded}
    assert all(torch.equal(stored[name], scaled[name]) for name in kept)
    assert any(not torch.equal(stored[name], was[name]) for name in kept if name.endswith("norm.weight"))
    # Without rounding, the scaled weights answer as those before.
    shutil.copytree(source, plain)
    exact = {name: value.float() for name, value in scaled.items()}
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    question = ["--question", "What is it?", "--text-only", "--max-tokens", "6", "--json", "--dtype", "float32"]
    kl = {}
    for path in (plain, out):
        assert main(["verify", str(path), "--unquantized", str(source), *question]) == 0
        kl[path] = json.loads(capsys.readouterr().out.splitlines()[-1])["kl"]
    assert max(kl[plain]) < 1e-4 < max(kl[out])


def test_it_needs_a_question(tmp_path: Path) -> None:
    assert main(["quantize", str(tiny.checkpoint("qwen2")), str(tmp_path / "out"), "--method", "awq"]) == 1
    assert not (tmp_path / "out").exists()


@torch.inference_mode()
def test_folds_that_change_the_answer_are_left_out() -> None:
    """A norm whose output also goes elsewhere, and one whose weight stands for one more."""

    class Layer(torch.nn.Module):
        def __init__(self, elsewhere: bool, plus: float) -> None:
            super().__init__()
            self.elsewhere, self.plus = elsewhere, plus
            self.norm = torch.nn.RMSNorm(32)
            self.norm.weight.data.uniform_(0.5, 1.5)
            self.up_proj, self.down_proj = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
            self.scale = Norm(self.norm, plus)

        def forward(self, x: Any) -> Any:
            normed = self.scale(x)
            made = self.down_proj(self.up_proj(normed))
            return made + normed if self.elsewhere else made

    class Norm(torch.nn.Module):
        def __init__(self, own: Any, plus: float) -> None:
            super().__init__()
            self.weight, self.plus = own.weight, plus

        def forward(self, x: Any) -> Any:
            return x / x.square().mean(-1, keepdim=True).sqrt() * (self.weight + self.plus)

    torch.manual_seed(0)
    for elsewhere, plus in ((False, 0.0), (False, 1.0), (True, 0.0)):
        layer = Layer(elsewhere, plus)
        model = torch.nn.Sequential(layer)
        x = torch.randn(4, 32)
        asking = activation_scales.Asking(lambda model=model, x=x: model(x)[-1], lambda: None, 1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        folds = [
            *(activation_scales.Fold("0.scale", ("0.up_proj",), "scale -> up_proj", each) for each in (0.0, 1.0)),
            activation_scales.Fold("0.up_proj", ("0.down_proj",), "up_proj -> down_proj", by_rows=True),
        ]
        kept = activation_scales._kept(model, folds, asking)
        assert [(fold.source, fold.plus) for fold in kept if not fold.by_rows] == (
            [] if elsewhere else [("0.scale", plus)]
        )
        assert len(kept) == 1 + (not elsewhere)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_channels_that_a_type_cannot_hold_divided_keep_their_weight() -> None:
    """The norm's weight stands for one more: 1 / 900 - 1 is -1 in bfloat16, and would make nothing of the channel."""
    weight = torch.tensor([0.0, 0.5, -1.0, 0.25]).to(torch.bfloat16)
    scale = activation_scales._as_stored(weight, torch.tensor([900.0, 3.0, 2.0, 0.5]), 1.0, weight.dtype)
    stored = activation_scales._divided(scale, 1.0)(weight)
    assert torch.equal(scale[[0, 2]], torch.ones(2))
    assert scale[1] > 2.9
    assert scale[3] < 0.51
    # What the norm makes, times what the next layers' inputs are multiplied by, is as it was.
    assert torch.allclose((stored.float() + 1) * scale, weight.float() + 1)
