"""Print what the model saw of each item and what was lost on the way, and refuse a loss.

python examples/receipts.py
"""

import argparse
from pathlib import Path

from PIL import Image

from beheld import LLM, SamplingParams
from beheld.core.errors import MediaLossError

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
arguments = parser.parse_args()

# A panorama, which loses most of its detail where a model sees 84,000 pixels at most.
panorama = Image.open(HERE / "scene.png").convert("RGB").resize((6400, 1200))


def ask(llm: LLM, image: object) -> object:
    """One question about one image."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in this picture?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    return llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]


# --8<-- [start:read]
with LLM(arguments.model, max_model_len=4096) as llm:
    for image in (Image.open(HERE / "scene.png"), panorama):
        receipt = ask(llm, image).media[0]
        print(f"{receipt.item}: given {receipt.given['width']} x {receipt.given['height']}")
        print(f"  the model saw {receipt.used['width']} x {receipt.used['height']}, {receipt.tokens} tokens")
        print(f"  from the cache: {receipt.cached}; milliseconds: {dict(receipt.milliseconds)}")
        for loss in receipt.lost:
            print("  lost:", loss)
# --8<-- [end:read]

# --8<-- [start:strict]
with LLM(arguments.model, max_model_len=4096, strict_media=True) as llm:
    try:
        ask(llm, panorama)
    except MediaLossError as error:
        print("refused:", error)
# --8<-- [end:strict]
