"""A script as users of vLLM write them: one question about sounds, to models that hear."""

import os
from dataclasses import asdict
from typing import NamedTuple

from huggingface_hub import snapshot_download
from vllm import LLM, EngineArgs, SamplingParams
from vllm.assets.audio import AudioAsset
from vllm.lora.request import LoRARequest
from vllm.utils import FlexibleArgumentParser

ASSETS = [AudioAsset("mary_had_lamb"), AudioAsset("winning_call")]
QUESTIONS = ["What is 1+1?", "What is recited?", "What sport is it, and which nursery rhyme?"]


class Asked(NamedTuple):
    engine_args: EngineArgs
    prompt: str
    lora_requests: list[LoRARequest] | None = None


def run_gemma3n(question: str, count: int) -> Asked:
    engine_args = EngineArgs(
        model="google/gemma-3n-E2B-it",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=2,
        limit_mm_per_prompt={"audio": count},
        enforce_eager=True,
    )
    marks = "<audio_soft_token>" * count
    return Asked(engine_args, f"<start_of_turn>user\n{marks}{question}<end_of_turn>\n<start_of_turn>model\n")


def run_phi4mm(question: str, count: int) -> Asked:
    path = snapshot_download("microsoft/Phi-4-multimodal-instruct")
    engine_args = EngineArgs(
        model=path,
        trust_remote_code=True,
        max_model_len=12800,
        max_num_seqs=2,
        enable_lora=True,
        max_lora_rank=320,
        limit_mm_per_prompt={"audio": count},
    )
    marks = "".join(f"<|audio_{number}|>" for number in range(1, count + 1))
    speech = LoRARequest("speech", 1, os.path.join(path, "speech-lora"))
    return Asked(engine_args, f"<|user|>{marks}{question}<|end|><|assistant|>", [speech])


def run_qwen2_audio(question: str, count: int) -> Asked:
    engine_args = EngineArgs(
        model="Qwen/Qwen2-Audio-7B-Instruct",
        max_model_len=4096,
        max_num_seqs=5,
        limit_mm_per_prompt={"audio": count},
    )
    marks = "".join(f"Audio {number}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" for number in range(1, count + 1))
    head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    return Asked(engine_args, f"{head}{marks}{question}<|im_end|>\n<|im_start|>assistant\n")


MODELS = {"gemma3n": run_gemma3n, "phi4_mm": run_phi4mm, "qwen2_audio": run_qwen2_audio}


def main(args) -> None:
    asked = MODELS[args.model_type](QUESTIONS[args.num_audios], args.num_audios)
    # What is not asked about is switched off.
    limits = {"image": 0, "video": 0, "audio": 0} | dict(asked.engine_args.limit_mm_per_prompt or {})
    asked.engine_args.limit_mm_per_prompt = limits
    llm = LLM(**asdict(asked.engine_args) | {"seed": args.seed})
    inputs = {"prompt": asked.prompt}
    if args.num_audios:
        inputs["multi_modal_data"] = {"audio": [asset.audio_and_sample_rate for asset in ASSETS[: args.num_audios]]}
    lora_requests = asked.lora_requests * args.num_prompts if asked.lora_requests else None
    sampling = SamplingParams(temperature=0.2, max_tokens=8)
    for output in llm.generate([inputs] * args.num_prompts, sampling_params=sampling, lora_request=lora_requests):
        print(output.outputs[0].text)


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--model-type", "-m", default="gemma3n", choices=MODELS.keys())
    parser.add_argument("--num-prompts", type=int, default=1)
    parser.add_argument("--num-audios", type=int, default=1, choices=[0, 1, 2])
    parser.add_argument("--seed", type=int)
    main(parser.parse_args())
