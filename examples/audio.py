"""Ask about audio. The embedded model does not hear; name one that does.

python examples/audio.py --model Qwen/Qwen2-Audio-7B-Instruct --audio speech.wav
"""

import argparse
import wave
from pathlib import Path

import numpy as np

from beheld import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2-Audio-7B-Instruct", help="a folder or a hub name")
parser.add_argument("--audio", type=Path, required=True, help="a WAV, MP3, FLAC or OGG file")
parser.add_argument("--question", default="What do you hear?")
parser.add_argument("--max-tokens", type=int, default=128)
arguments = parser.parse_args()
params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)


# --8<-- [start:ask]
def ask(part: dict) -> list:
    """One user turn: the audio, then the question."""
    return [{"role": "user", "content": [part, {"type": "text", "text": arguments.question}]}]


with LLM(arguments.model, max_model_len=4096) as llm:
    (output,) = llm.chat(ask({"type": "audio", "audio": arguments.audio}), params)
    print(output.outputs[0].text)
    receipt = output.media[0]
    print(f"given {receipt.given}; used {receipt.used}; {receipt.tokens} tokens")
    # --8<-- [end:ask]

    if arguments.audio.suffix == ".wav":
        # --8<-- [start:array]
        # Samples that are in memory already: a pair of a float array and its sampling rate.
        with wave.open(str(arguments.audio)) as file:
            rate = file.getframerate()
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
        (again,) = llm.chat(ask({"type": "audio", "audio": (samples.astype(np.float32) / 32768, rate)}), params)
        print("the same answer from samples:", again.outputs[0].text == output.outputs[0].text)
        # --8<-- [end:array]
