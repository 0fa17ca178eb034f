"""Trains mote: python -m training.mote.train --seconds 560 --budget 2000 --out FOLDER.

The learning rate follows the clock: it rises over the first steps and falls to zero when the seconds of all calls
together reach the budget. A call that finds a state file goes on from it; with --weights it starts from a checkpoint.
"""

import argparse
import math
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, Qwen2VLForConditionalGeneration

from training.mote.ahead import Ahead
from training.mote.checkpoint import build_tokenizer, read_words, write_settings
from training.mote.learn import loss_of, score
from training.mote.muon import Muon
from training.mote.shard import EVALUATION_SEED, make_shard
from training.mote.supply import Supply, load


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=560, help="how long this call may train")
    parser.add_argument("--budget", type=float, default=2000, help="seconds of all calls together")
    parser.add_argument("--elapsed", type=float, default=0, help="seconds already spent, for a start from weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--state", type=Path, default=Path("/tmp/mote_state.pt"))
    parser.add_argument("--weights", type=Path, help="a checkpoint to start from")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--shards", type=int, default=6, help="shards a step: 40 pictures and 5 clips each")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=300, help="steps of rising learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", type=float, default=60, help="seconds between evaluations")
    return parser.parse_args()


def build(settings: Path, weights: Path | None, device: torch.device) -> Qwen2VLForConditionalGeneration:
    """The model in bf16, from a checkpoint or fresh."""
    made: Any
    if weights is not None:
        made = Qwen2VLForConditionalGeneration.from_pretrained(weights, dtype=torch.bfloat16)
        return made.to(device)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(settings)
    # Not made in fp32 and then cast: that would round the rotary frequencies too, and a loaded model has them exact.
    made = Qwen2VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    return made.to(device)


def rate_at(peak: float, rise: float, elapsed: float, budget: float) -> float:
    """Learning rate: `rise` is the part of the warm-up that is done; then half a cosine over the budget."""
    done = min(1.0, elapsed / budget)
    return peak * min(1.0, rise) * (0.5 + 0.5 * math.cos(math.pi * done))


class Trainer:
    """What one call holds: model, optimiser, clock and the shards that are never trained on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        write_settings(options.out, read_words())
        self.model = build(options.out, options.weights, self.device)
        self.optimiser = Muon(self.model)
        self.steps, self.before = 0, options.elapsed
        if options.state.exists():
            saved = torch.load(options.state, map_location=self.device, weights_only=False)
            self.optimiser.restore(saved["optimiser"])
            self.steps, self.before = saved["steps"], saved["elapsed"]
        tokenizer = build_tokenizer(read_words())
        self.unseen = [load(make_shard(tokenizer, EVALUATION_SEED + index), self.device) for index in range(4)]
        self.started = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds of this call."""
        return time.monotonic() - self.started

    def save(self) -> None:
        """Write the checkpoint and the state to go on from."""
        self.model.save_pretrained(self.options.out)
        state = {"optimiser": self.optimiser.state(), "steps": self.steps, "elapsed": self.before + self.spent}
        torch.save(state, self.options.state)

    def run(self, supply: Supply) -> None:
        """Train until the seconds of this call are over."""
        ahead = Ahead(supply, Random(self.steps), self.options.shards, self.device)
        told = checked = 0.0
        losses: list[torch.Tensor] = []
        marks: list[torch.cuda.Event] = []
        first = self.steps
        while self.spent < self.options.seconds:
            loss = loss_of(self.model, ahead.next())
            loss.backward()
            rise = (self.steps + 1) / self.options.warm_up
            rate = rate_at(self.options.rate, rise, self.before + self.spent, self.options.budget)
            norm = self.optimiser.step(rate)
            # The host may be one step ahead of the device, no more: every step in flight holds its memory.
            marks.append(torch.cuda.current_stream().record_event())
            if len(marks) > 1:
                marks.pop(0).synchronize()
            losses.append(loss.detach())
            self.steps += 1
            if self.spent - told > 15:
                told = self.spent
                mean = torch.stack(losses).mean().item()
                speed = (self.steps - first) / self.spent
                print(
                    f"{self.before + told:6.0f} s step {self.steps} loss {mean:.4f} norm {float(norm):.2f} "
                    f"rate {rate:.5f} {speed:.2f} steps/s {supply.rendered / self.spent:.1f} shards/s",
                    flush=True,
                )
                losses.clear()
            if self.spent - checked > self.options.check:
                checked = self.spent
                print("        unseen:", score(self.model, self.unseen), flush=True)
                self.save()
        print("        unseen:", score(self.model, self.unseen), flush=True)
        self.save()


def main() -> None:
    """Render and train."""
    options = parse()
    # Workers are forked before the device is touched, and their seeds never reach those of the evaluation.
    supply = Supply(options.workers, options.seed * 10_000_000)
    trainer = Trainer(options)
    supply.start(trainer.device)
    try:
        trainer.run(supply)
    finally:
        supply.close()


if __name__ == "__main__":
    main()
