"""Read the text of a page and print it as JSON.

A model that was trained on documents reads the whole page. The embedded model reads one short line at a time; for it
the page is cut into its lines first, which also shows how to put a step of your own before the model.

python examples/ocr_page.py --out page.json
python examples/ocr_page.py --model tencent/HunyuanOCR --page scan.png --prompt "Read the text of this page."
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from beheld import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model reads line by line")
parser.add_argument("--page", help="a path; without it a page is drawn")
parser.add_argument("--prompt", default="What does the text say?")
parser.add_argument("--out", type=Path, help="a file for the JSON; without it, standard output")
arguments = parser.parse_args()


def drawn_page() -> Image.Image:
    """A page of four short lines."""
    page = Image.new("RGB", (480, 400), "white")
    font = ImageFont.load_default(size=44)
    for number, line in enumerate(("Invoice", "No 4711", "Total 90", "Thanks")):
        ImageDraw.Draw(page).text((60, 30 + 90 * number), line, fill="black", font=font)
    return page


# --8<-- [start:lines]
def lines_of(page: Image.Image, margin: int = 40) -> list[Image.Image]:
    """Cut a page with dark text on a light ground where rows of pixels are empty."""
    dark = np.asarray(page.convert("L")) < 128
    rows = np.flatnonzero(dark.any(axis=1))
    groups = np.split(rows, np.flatnonzero(np.diff(rows) > 12) + 1)
    found = []
    for group in groups:
        columns = np.flatnonzero(dark[group[0] : group[-1] + 1].any(axis=0))
        box = (columns[0] - margin, group[0] - margin, columns[-1] + margin, group[-1] + margin)
        line = Image.new("RGB", (box[2] - box[0], box[3] - box[1]), "white")
        line.paste(page.crop((columns[0], group[0], columns[-1] + 1, group[-1] + 1)), (margin, margin))
        found.append(line)
    return found


# --8<-- [end:lines]


# --8<-- [start:read]
page = Image.open(arguments.page).convert("RGB") if arguments.page else drawn_page()
images = [page] if arguments.model else lines_of(page)
with LLM(arguments.model) as llm:
    conversations = [
        [
            {
                "role": "user",
                "content": [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": arguments.prompt}],
            }
        ]
        for image in images
    ]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=1024), use_tqdm=False)
text = json.dumps({"lines": [output.outputs[0].text for output in outputs]}, ensure_ascii=False, indent=1)
if arguments.out:
    arguments.out.write_text(text)
else:
    sys.stdout.write(text + "\n")
# --8<-- [end:read]
