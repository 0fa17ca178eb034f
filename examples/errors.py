"""One bad item never hurts another: it fails alone, with a reason and a remedy, and the others are answered.

python examples/errors.py
"""

import argparse
from pathlib import Path

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
arguments = parser.parse_args()

# --8<-- [start:errors]
broken = (HERE / "scene.png").read_bytes()[:2000]
images = [HERE / "scene.png", broken, HERE / "missing.png", HERE / "sign.png"]
with LLM(arguments.model, max_model_len=4096) as llm:
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]}]
        for image in images
    ]
    params = SamplingParams(temperature=0, max_tokens=64)
    for output in llm.chat(conversations, params, use_tqdm=False, on_error="return"):
        if output.error is None:
            print("answer:", output.outputs[0].text)
        else:
            error = output.error
            print(f"error: {type(error).__name__} in stage {error.stage}, {error.item}: {error.reason} {error.remedy}")
# --8<-- [end:errors]
