"""Teaches mote to say that it does not know what a picture shows: one more decoder layer, and nothing else is changed.

    python -m training.mote.teach_unknown cache --photos FOLDER --out STATES.pt --known 3600 --unknown 2600
    python -m training.mote.teach_unknown train STATES.pt --out CHECKPOINT
    python -m training.mote.teach_unknown check CHECKPOINT --photos OTHER_FOLDER --num 200

`cache` runs the model as it is over scenes of every topic and over pictures of other things (`unknown.py`), and keeps
what its last layer gives. `train` adds a layer to that, which begins as the identity: on scenes it must leave the
probabilities of the answers as they are (Kullback-Leibler divergence), on other pictures it must give the sentence.
`check` counts how often pictures of other things, none of them trained on, get the sentence.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from training.mote.evaluate import Case, Input, answer, processed, sample_case
from training.mote.questions import Exchange
from training.mote.unknown import DRAWN, photo_files, photograph, unknown
from training.mote.wording import COLOURS_SEEN, COUNT_ALL, DESCRIBE, READ, SHAPES_SEEN, SYSTEMS, fill, roughen

SENTENCE = "I only know drawn shapes and printed text."
MOTE = Path(__file__).resolve().parents[2] / "beheld" / "mote"
# Scenes of `evaluate` have smaller numbers.
FIRST_NUMBER = 1_000_000
END_ID = 2
WIDEST = 900
LARGEST = 900
ASKED = (
    *(
        "What is this?",
        "What is in this picture?",
        "What do you see?",
        "Describe this image in detail.",
        "Caption this.",
    ),
    *("What is shown here?", "Who is this?", "Where was this taken?", "What animal is this?", "Is there a dog?"),
    *("What colour is the car?", "How many people are there?", "What is the person doing?", "Is it day or night?"),
    *("What does the sign say?", "What text is in the image?", "Summarize this page.", "What is the weather like?"),
    *("Read this document.", "What is the total on this receipt?", "Which year is it?", "Is this a photo?"),
    *("What is the main object?", "Is there a red circle?", "What shape is in the middle?", "What is on the left?"),
    *("Describe the picture.", "What can you see in the photo?", "Tell me about this picture.", "What is it?"),
    *("Explain this chart.", "What does the error message say?", "Is this safe to eat?", "What brand is this?"),
    *(
        "Write a short description of the image.",
        "List the objects.",
        "What is happening here?",
        "Hello! What is this?",
    ),
)
_POOLS = (DESCRIBE, COUNT_ALL, READ, COLOURS_SEEN, SHAPES_SEEN)


def unknown_case(rng: Random, pictures: list[Image.Image]) -> Case:
    """A question about pictures of other things."""
    question = rng.choice(ASKED) if rng.random() < 0.6 else fill(rng, rng.choice(_POOLS))
    system = rng.choice(SYSTEMS) if rng.random() < 0.3 else None
    exchange = Exchange("unknown", question, SENTENCE)
    return Case(exchange, pictures, [], roughen(rng, question), system, rng.random() < 0.2)


def cases(known: int, others: int, photos: list[list[Path]]) -> Iterator[tuple[str, Case]]:
    """Scenes of all topics and other pictures, in turn."""
    rng = Random("teach unknown")
    topics = ("attributes", "attributes", "description", "description", "text", "text", "several", "motion", "talk")
    share = others / max(1, known + others)
    for number in range(known + others):
        if rng.random() < share:
            count = rng.choices((1, 2, 3), (88, 8, 4))[0]
            yield "unknown", unknown_case(rng, [unknown(rng, photos) for _ in range(count)])
        else:
            topic = topics[number % len(topics)]
            yield topic, sample_case(topic, FIRST_NUMBER + number, LARGEST)


class States:
    """Runs the model and keeps what its last layer gives, with the positions that the next layer needs."""

    def __init__(self) -> None:
        self.processor = AutoProcessor.from_pretrained(MOTE)
        self.model: Any = Qwen2VLForConditionalGeneration.from_pretrained(MOTE, dtype=torch.float32).eval()
        text = self.model.model.language_model
        text.layers[-1].register_forward_hook(lambda _, given, made: self._take(made))
        text.rotary_emb.register_forward_pre_hook(self._place, with_kwargs=True)

    def _take(self, made: Any) -> None:
        self._hidden = (made[0] if isinstance(made, tuple) else made)[0]

    def _place(self, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._positions = (named["position_ids"] if "position_ids" in named else given[1])[:, 0]

    @torch.inference_mode()
    def of(self, topic: str, case: Case) -> dict[str, Any]:
        """What is kept of one case."""
        item = processed(self.processor, topic, case)
        said = self.processor.tokenizer(case.exchange.answer, add_special_tokens=False)["input_ids"]
        more = torch.tensor([*said, END_ID])
        ids = torch.cat([item.ids, more])
        types = torch.cat([item.types, torch.zeros_like(more)])
        given: dict[str, Any] = {"input_ids": ids[None], "mm_token_type_ids": types[None]}
        if item.pixels is not None:
            given["pixel_values_videos" if item.is_clip else "pixel_values"] = item.pixels
            given["video_grid_thw" if item.is_clip else "image_grid_thw"] = item.grids
        self.model(**given, attention_mask=torch.ones_like(ids)[None], logits_to_keep=1)
        return {
            "hidden": self._hidden.half(),
            "positions": self._positions.short(),
            "said": ids.short(),
            "begin": len(item.ids),
            "unknown": topic == "unknown",
        }


def cache(options: argparse.Namespace) -> None:
    """Keep the states of all cases."""
    torch.set_num_threads(1)
    states, kept, begun = States(), [], time.monotonic()
    photos = photo_files(options.photos) if options.photos else []
    for number, (topic, case) in enumerate(cases(options.known, options.unknown, photos)):
        if number % options.parts != options.part:
            continue
        made = states.of(topic, case)
        if made["hidden"].shape[0] <= WIDEST:
            kept.append(made)
        if len(kept) % 100 == 0:
            print(f"{len(kept)} in {time.monotonic() - begun:.0f} s", flush=True)
    torch.save(kept, options.out)


def batch_of(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Items padded on the right."""
    longest = max(item["hidden"].shape[0] for item in items)
    rows, width = len(items), items[0]["hidden"].shape[1]
    made = {
        "hidden": torch.zeros(rows, longest, width),
        "positions": torch.zeros(3, rows, longest, dtype=torch.long),
        "next": torch.zeros(rows, longest, dtype=torch.long),
        "answers": torch.zeros(rows, longest, dtype=torch.bool),
        "unknown": torch.tensor([item["unknown"] for item in items]),
    }
    for row, item in enumerate(items):
        count = item["hidden"].shape[0]
        made["hidden"][row, :count] = item["hidden"]
        made["positions"][:, row, :count] = item["positions"]
        made["next"][row, : count - 1] = item["said"][1:]
        made["answers"][row, item["begin"] - 1 : count - 1] = True
    return made


def losses(model: Any, layer: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence on scenes, the cross-entropy on others, and the share of others whose first token is right."""
    text = model.model.language_model
    hidden = batch["hidden"]
    count = hidden.shape[1]
    causal = torch.full((count, count), float("-inf")).triu(1)[None, None]
    places = text.rotary_emb(hidden, batch["positions"])
    made = layer(hidden, attention_mask=causal, position_embeddings=places)
    made = made[0] if isinstance(made, tuple) else made
    answers, others = batch["answers"], batch["unknown"][:, None]
    log_probs = model.lm_head(text.norm(made[answers])).log_softmax(-1)
    with torch.no_grad():
        before = model.lm_head(text.norm(hidden[answers])).log_softmax(-1)
    is_other = others.expand_as(answers)[answers]
    wanted = batch["next"][answers]
    divergence = functional.kl_div(log_probs, before, log_target=True, reduction="none").sum(-1)
    entropy = functional.nll_loss(log_probs, wanted, reduction="none")
    right = (log_probs.argmax(-1) == wanted)[is_other].float()
    zero = log_probs.sum() * 0.0
    return (
        divergence[~is_other].mean() if (~is_other).any() else zero,
        entropy[is_other].mean() if is_other.any() else zero,
        right.mean() if is_other.any() else zero + 1.0,
    )


def train(options: argparse.Namespace) -> None:
    """Train the layer and write the checkpoint with it."""
    torch.manual_seed(0)
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(MOTE, dtype=torch.float32).eval().requires_grad_(False)
    config = model.config.text_config
    index = config.num_hidden_layers
    if hasattr(config, "layer_types") and config.layer_types is not None:
        config.layer_types = [*config.layer_types, config.layer_types[-1]]
    layer = type(model.model.language_model.layers[-1])(config, index)
    for name, weight in layer.named_parameters():
        with torch.no_grad():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif weight.dim() == 2:
                weight.normal_(0, 0.04)
    items = [item for file in options.states for item in torch.load(file)]
    Random(1).shuffle(items)
    held, items = items[: len(items) // 12], items[len(items) // 12 :]
    print(f"{len(items)} items, {sum(item['unknown'] for item in items)} of other things", flush=True)
    best = torch.optim.AdamW(layer.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.02)
    rng, begun = Random(2), time.monotonic()
    for step in range(options.steps):
        part = step / options.steps
        for group in best.param_groups:
            group["lr"] = options.rate * min(1.0, step / 50) * (1.0 - part * part)
        layer.train()
        divergence, entropy, _ = losses(model, layer, batch_of(rng.sample(items, options.batch)))
        loss = options.keep * divergence + entropy
        best.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        best.step()
        if step % 50 == 0 or step == options.steps - 1:
            layer.eval()
            with torch.no_grad():
                found = [losses(model, layer, batch_of(held[i : i + 24])) for i in range(0, len(held), 24)]
            means = [float(torch.stack([each[k] for each in found]).mean()) for k in range(3)]
            print(
                f"{step}: held {means[0]:.4f} {means[1]:.4f} {means[2]:.4f}; {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    write(
        options.out, {f"model.language_model.layers.{index}.{n}": w for n, w in layer.state_dict().items()}, index + 1
    )


def write(folder: Path, more: dict[str, Tensor], num_layers: int) -> None:
    """Write mote with further weights."""
    shutil.copytree(MOTE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    weights = load_file(MOTE / "model.safetensors")
    prefix = next(name for name in weights if ".layers.0." in name and "visual" not in name).split("layers.0.")[0]
    for name, weight in more.items():
        weights[prefix + name.partition("language_model.")[2]] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check(options: argparse.Namespace) -> None:
    """Count the sentence on other pictures: photographs of a folder, and each drawn kind, with other seeds."""
    processor = AutoProcessor.from_pretrained(options.checkpoint)
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(options.checkpoint, dtype=torch.bfloat16).eval()
    photos = [path for group in photo_files(options.photos) for path in group] if options.photos else []
    each = options.num // (1 + len(DRAWN))
    kinds: dict[str, list[Image.Image]] = {"photographs": []}
    for number, path in enumerate(photos[: options.num]):
        with Image.open(path) as opened:
            whole = opened.convert("RGB")
        whole.thumbnail((1600, 1600))
        kinds["photographs"].append(whole)
        if len(photos) < each:
            kinds["photographs"].append(photograph(Random(f"check/{number}"), path))
    for draw in DRAWN:
        kinds[draw.__name__] = [draw(Random(f"check/{draw.__name__}/{number}")) for number in range(each)]
    total = said = 0
    for kind, pictures in kinds.items():
        right = 0
        for number, picture in enumerate(pictures):
            case = unknown_case(Random(f"ask/{kind}/{number}"), [picture])
            item: Input = processed(processor, "unknown", case)
            text = processor.tokenizer.decode(answer(model, [item])[0], skip_special_tokens=True)
            right += text == SENTENCE
            if text != SENTENCE:
                print(f"{kind} {number}: {case.question!r} -> {text!r}", flush=True)
        total, said = total + len(pictures), said + right
        print(f"{kind}: {right} of {len(pictures)}", flush=True)
    print(f"{said} of {total}: {said / max(1, total):.1%}")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    acts = parser.add_subparsers(required=True)
    caching = acts.add_parser("cache")
    caching.add_argument("--photos", type=Path)
    caching.add_argument("--out", type=Path, required=True)
    caching.add_argument("--known", type=int, default=3600)
    caching.add_argument("--unknown", type=int, default=2600)
    caching.add_argument("--part", type=int, default=0, help="of several processes, which one this is")
    caching.add_argument("--parts", type=int, default=1)
    caching.set_defaults(act=cache)
    training = acts.add_parser("train")
    training.add_argument("states", type=Path, nargs="+")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--steps", type=int, default=1500)
    training.add_argument("--batch", type=int, default=16)
    training.add_argument("--rate", type=float, default=1.5e-3)
    training.add_argument("--keep", type=float, default=4.0, help="weight of leaving scenes as they are")
    training.set_defaults(act=train)
    checking = acts.add_parser("check")
    checking.add_argument("checkpoint", type=Path)
    checking.add_argument("--photos", type=Path)
    checking.add_argument("--num", type=int, default=200)
    checking.set_defaults(act=check)
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
