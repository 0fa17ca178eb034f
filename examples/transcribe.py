"""Write down what is spoken in audio, of any length. The embedded model does not hear; name one that does.

python examples/transcribe.py --model openai/whisper-large-v3-turbo --audio speech.wav
"""

import argparse
import asyncio
from pathlib import Path

from beheld import LLM, AsyncLLM, SamplingParams, SpeechOrder

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="openai/whisper-large-v3-turbo", help="a folder or a hub name")
parser.add_argument("--audio", type=Path, required=True, help="a WAV, MP3, FLAC or OGG file")
parser.add_argument("--language", default="en", help="the code of the language that is spoken")
parser.add_argument("--max-tokens", type=int, default=200)
arguments = parser.parse_args()

# --8<-- [start:short]
# Up to 30 seconds, as vLLM's scripts for Whisper write it. The decoder continues the prompt.
params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
task = f"<|startoftranscript|><|{arguments.language}|><|transcribe|><|notimestamps|>"
with LLM(arguments.model, max_num_seqs=4) as llm:
    prompts = [
        {"prompt": task, "multi_modal_data": {"audio": arguments.audio}},
        # The same, with the parts of encoder and decoder named.
        {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": arguments.audio}}, "decoder_prompt": task},
    ]
    first, second = llm.generate(prompts, params)
    print("short:", first.outputs[0].text)
    print("the same in both forms:", first.outputs[0].text == second.outputs[0].text)
    # --8<-- [end:short]


# --8<-- [start:long]
async def write_down() -> None:
    """Audio of any length, window after window, with the time of each segment."""
    order = SpeechOrder(language=arguments.language, timestamps=True)
    async with AsyncLLM(arguments.model, max_num_seqs=4) as llm:
        async for piece in llm.transcribe(arguments.audio, order, params):
            for segment in piece.segments:
                print(f"{segment.start_s:.2f} to {segment.stop_s:.2f}: {segment.text.strip()}")


asyncio.run(write_down())
# --8<-- [end:long]
