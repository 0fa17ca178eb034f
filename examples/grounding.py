"""Ask a model where things are, and draw what it says into the image.

The model must be one that points: see docs/how-to/grounding.md.

python examples/grounding.py --model Qwen/Qwen3-VL-2B-Instruct
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw

from beheld import LLM, SamplingParams
from beheld.core.params import StructuredOutputs

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a folder or a hub name")
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
parser.add_argument("--to", type=Path, default=Path("boxes.png"))
arguments = parser.parse_args()

place = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1000}, "minItems": 4, "maxItems": 4}
shape = {
    "type": "object",
    "properties": {"bbox_2d": place, "label": {"enum": ["circle", "square", "star", "triangle"]}},
    "required": ["bbox_2d", "label"],
}
form = StructuredOutputs(json={"type": "array", "items": shape, "minItems": 1, "maxItems": 4})

# --8<-- [start:ask]
with LLM(arguments.model, max_model_len=4096) as llm:
    question = "Locate every shape. Answer with a JSON list of bbox_2d and label."
    content = [{"type": "image", "image": arguments.image}, {"type": "text", "text": question}]
    params = SamplingParams(temperature=0, max_tokens=512, structured_outputs=form)
    (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False, grounding=True)

image = Image.open(arguments.image).convert("RGB")
for found in output.outputs[0].grounding:
    print(found.label, found.box, "within", found.step)
    ImageDraw.Draw(image).rectangle(found.box, outline="red", width=3)
image.save(arguments.to)
# --8<-- [end:ask]
