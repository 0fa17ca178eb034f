"""Ask about a video, choose how many frames the model sees, and print which ones it saw.

python examples/video.py
python examples/video.py --model Qwen/Qwen2.5-VL-3B-Instruct --video clip.mp4 --frames 32
"""

import argparse
from pathlib import Path

from beheld import LLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--video", type=Path, default=HERE / "motion.mp4")
parser.add_argument("--question", default="Describe this video.")
parser.add_argument("--frames", type=int, default=8, help="most frames that are read from the file")
arguments = parser.parse_args()

# --8<-- [start:ask]
with LLM(arguments.model, media_io_kwargs={"video": {"num_frames": arguments.frames}}) as llm:
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "video", "video": arguments.video},
                {"type": "text", "text": arguments.question},
            ],
        }
    ]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128))
    print(output.outputs[0].text)

    receipt = output.media[0]
    print(f"{receipt.used['frames']} frames, {receipt.tokens} tokens, at seconds {receipt.used['timestamps_s']}")
    for loss in receipt.lost:
        print("lost:", loss)
# --8<-- [end:ask]
