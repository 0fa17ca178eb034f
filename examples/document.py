"""Ask about pages of a PDF, and read from the receipts which ones the model saw.

python examples/document.py
"""

import argparse
from pathlib import Path

from PIL import Image

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--file", type=Path, help="a PDF; without it one of two drawings is made")
parser.add_argument("--pages", default="1-2")
arguments = parser.parse_args()

if arguments.file is None:
    arguments.file = Path("drawings.pdf")
    first, second = (Image.open(HERE / f"two_pictures_{name}.png").convert("RGB") for name in "ab")
    first.save(arguments.file, save_all=True, append_images=[second])

# --8<-- [start:ask]
with LLM(arguments.model, max_model_len=4096) as llm:
    content = [
        {"type": "file", "file": arguments.file, "pages": arguments.pages, "dpi": 72},
        {"type": "text", "text": "What is in this picture?"},
    ]
    params = SamplingParams(temperature=0, max_tokens=64)
    output = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]
    print(output.outputs[0].text)
    for receipt in output.media:
        print(f"{receipt.item}: page {receipt.given['page']} of {receipt.given['pages']}")
# --8<-- [end:ask]
