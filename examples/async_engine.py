"""Several conversations at once in one asyncio program, each streamed as it grows.

python examples/async_engine.py
"""

import argparse
import asyncio
from pathlib import Path

from beheld import AsyncLLM, SamplingParams

HERE = Path(__file__).parent

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--images", type=Path, nargs="+", default=[HERE / "scene.png", HERE / "sign.png"])
parser.add_argument("--question", default="Describe this picture.")
arguments = parser.parse_args()


# --8<-- [start:async]
async def describe(llm: AsyncLLM, path: Path) -> str:
    """The whole answer, put together from its pieces."""
    content = [
        {"type": "image", "image": path},
        {"type": "text", "text": arguments.question},
    ]
    text = ""
    params = SamplingParams(temperature=0, max_tokens=128)
    # Leaving this loop early, or cancelling the task, ends the request in the engine.
    async for output in llm.chat([{"role": "user", "content": content}], params, pieces="delta"):
        text += output.outputs[0].text
    return text


async def main() -> None:
    """Ask about all images at once."""
    async with AsyncLLM(arguments.model, max_model_len=4096) as llm:
        answers = await asyncio.gather(*(describe(llm, path) for path in arguments.images))
    for path, answer in zip(arguments.images, answers, strict=True):
        print(f"{path.name}: {answer}")


asyncio.run(main())
# --8<-- [end:async]
