"""One batch in which some requests use a LoRA adapter and others do not.

python examples/lora.py --model Qwen/Qwen2.5-VL-3B-Instruct --adapter /adapters/mine
"""

import argparse
from pathlib import Path

from beheld import LLM, LoRARequest, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a folder or a hub name")
parser.add_argument("--adapter", required=True, help="a folder as peft writes it")
parser.add_argument("--max-lora-rank", type=int, default=64)
parser.add_argument("--image", type=Path, default=HERE / "scene.png")
arguments = parser.parse_args()

# --8<-- [start:lora]
options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": arguments.max_lora_rank}
with LLM(arguments.model, max_model_len=1024, **options) as llm:
    conversation = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": arguments.image},
                {"type": "text", "text": "Describe this picture."},
            ],
        }
    ]
    adapter = LoRARequest("mine", 1, arguments.adapter)
    plain, adapted = llm.chat(
        [conversation, conversation], SamplingParams(temperature=0, max_tokens=32), lora_request=[None, adapter]
    )
    print("the model itself:", plain.outputs[0].text)
    print("with the adapter:", adapted.outputs[0].text)
# --8<-- [end:lora]
