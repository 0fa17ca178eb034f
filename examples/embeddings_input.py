"""Give embeddings in place of an image: computed once, elsewhere or earlier, and used as often as needed.

Here transformers computes them with the model's own vision tower; the answer is the same as for the image itself.

python examples/embeddings_input.py
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from beheld import LLM, SamplingParams, mote

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model", default=str(mote.path()), help="a folder or a hub name of Qwen2-VL's or Qwen2.5-VL's kind"
)
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
arguments = parser.parse_args()

# --8<-- [start:embed]
processor = AutoProcessor.from_pretrained(arguments.model)
tower = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32)
image = Image.open(arguments.image).convert("RGB")
features = processor.image_processor(images=[image], return_tensors="pt")
grid = features["image_grid_thw"]
with torch.inference_mode():
    found = tower.model.visual(features["pixel_values"], grid_thw=grid)
    embeddings = getattr(found, "pooler_output", found)
print(f"{embeddings.shape[0]} embeddings of width {embeddings.shape[1]}")
# --8<-- [end:embed]

# --8<-- [start:ask]
with LLM(arguments.model, max_model_len=4096, dtype="float32") as llm:
    content = [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    params = SamplingParams(temperature=0, max_tokens=64)
    given = {"image_embeds": embeddings, "image_grid_thw": grid}
    from_embeddings, from_image = llm.generate(
        [
            {"prompt": prompt, "multi_modal_data": {"image": given}},
            {"prompt": prompt, "multi_modal_data": {"image": image}},
        ],
        params,
    )
    print("from embeddings:", from_embeddings.outputs[0].text)
    print("from the image: ", from_image.outputs[0].text)
# --8<-- [end:ask]
