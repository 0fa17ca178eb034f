"""How many tokens would media take? Ask before anything is computed.

python examples/plan.py
python examples/plan.py --model Qwen/Qwen2.5-VL-3B-Instruct photo.jpg clip.mp4
"""

import argparse
from pathlib import Path

from beheld import LLM
from beheld.core.media import MediaRef

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("media", type=Path, nargs="*", default=[HERE / "scene.png", HERE / "motion.mp4"])
arguments = parser.parse_args()

# --8<-- [start:plan]
VIDEOS = (".mp4", ".mkv", ".webm", ".mov", ".gif")
with LLM(arguments.model, max_model_len=4096) as llm:
    refs = [MediaRef("video" if path.suffix in VIDEOS else "image", path) for path in arguments.media]
    receipts = llm.plan(refs)
    for path, receipt in zip(arguments.media, receipts, strict=True):
        print(f"{path.name}: {receipt.tokens} tokens; the model would see {dict(receipt.used)}")
    print(f"{sum(receipt.tokens for receipt in receipts)} tokens in all")
# --8<-- [end:plan]
