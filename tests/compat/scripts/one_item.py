"""A script as users of vLLM write them: one picture or video by name, the same for many prompts or not."""

import random
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import NamedTuple

from vllm import LLM, EngineArgs, SamplingParams
from vllm.assets.image import ImageAsset
from vllm.assets.video import VideoAsset
from vllm.lora.request import LoRARequest
from vllm.multimodal.image import convert_image_mode
from vllm.utils.argparse_utils import FlexibleArgumentParser


class Asked(NamedTuple):
    engine_args: EngineArgs
    prompts: list[str]
    stop_token_ids: list[int] | None = None
    lora_requests: list[LoRARequest] | None = None
    sampling_params: list[SamplingParams] | None = None


def run_llava(questions: list[str], modality: str) -> Asked:
    assert modality == "image"
    engine_args = EngineArgs(
        model="llava-hf/llava-1.5-7b-hf",
        max_model_len=1024,
        disable_mm_preprocessor_cache=args.disable_mm_preprocessor_cache,
    )
    return Asked(engine_args, [f"USER: <image>\n{question}\nASSISTANT:" for question in questions])


def run_idefics3(questions: list[str], modality: str) -> Asked:
    assert modality == "image"
    engine_args = EngineArgs(
        model="HuggingFaceM4/Idefics3-8B-Llama3",
        max_model_len=8192,
        max_num_seqs=2,
        mm_processor_kwargs={"size": {"longest_edge": 2 * 364}},
    )
    prompts = [f"<|begin_of_text|>User:<image>{question}<end_of_utterance>\nAssistant:" for question in questions]
    return Asked(engine_args, prompts)


def run_qwen2_5_vl(questions: list[str], modality: str) -> Asked:
    engine_args = EngineArgs(
        model="Qwen/Qwen2.5-VL-3B-Instruct",
        max_model_len=4096,
        max_num_seqs=5,
        mm_processor_kwargs={"min_pixels": 28 * 28, "max_pixels": 1280 * 28 * 28, "fps": 1},
        limit_mm_per_prompt={modality: 1},
    )
    mark = "<|image_pad|>" if modality == "image" else "<|video_pad|>"
    prompts = [
        f"<|im_start|>user\n<|vision_start|>{mark}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in questions
    ]
    return Asked(engine_args, prompts)


def run_barred(questions: list[str], modality: str) -> Asked:
    from vllm.model_executor.models.deepseek_ocr import NGramPerReqLogitsProcessor

    asked = run_llava(questions, modality)
    asked.engine_args.logits_processors = [NGramPerReqLogitsProcessor]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=40,
            ignore_eos=True,
            extra_args=dict(ngram_size=1, window_size=90, whitelist_token_ids={28, 29}),  # noqa: C408 - as scripts have it
            skip_special_tokens=False,
        )
        for _ in questions
    ]
    return asked._replace(sampling_params=params)


def run_deepseek_ocr(questions: list[str], modality: str) -> Asked:
    from vllm.model_executor.models.deepseek_ocr import NGramPerReqLogitsProcessor

    engine_args = EngineArgs(
        model="deepseek-ai/DeepSeek-OCR",
        limit_mm_per_prompt={modality: 1},
        logits_processors=[NGramPerReqLogitsProcessor],
    )
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=40,
            extra_args=dict(ngram_size=30, window_size=90, whitelist_token_ids={128821, 128822}),  # noqa: C408 - as scripts have it
            skip_special_tokens=False,
        )
        for _ in questions
    ]
    return Asked(engine_args, [f"<image>\n{question}" for question in questions], sampling_params=params)


MODELS = {
    "barred": run_barred,
    "deepseek_ocr": run_deepseek_ocr,
    "idefics3": run_idefics3,
    "llava": run_llava,
    "qwen2_5_vl": run_qwen2_5_vl,
}


def media(modality: str, num_frames: int):
    if modality == "image":
        picture = convert_image_mode(ImageAsset("cherry_blossom").pil_image, "RGB")
        return picture, ["What is in this image?", "Describe it.", "Where is this image taken?", "Why?"]
    return VideoAsset(name="sample_demo_1.mp4", num_frames=num_frames).np_ndarrays, ["Why is this video funny?"]


@contextmanager
def timed(wanted: bool):
    start = time.time()
    yield
    if wanted:
        print(f"-- generate time = {time.time() - start}")


def inputs_of(prompts: list[str], modality: str, data) -> list[dict]:
    found = []
    for index in range(args.num_prompts):
        if args.image_repeat_prob is not None and random.random() > args.image_repeat_prob:
            data = data.copy()
            data.putpixel((0, 0), (index // 65536, index // 256, index % 256))
        found.append({"prompt": prompts[index % len(prompts)], "multi_modal_data": {modality: data}})
    return found


def main() -> None:
    data, questions = media(args.modality, args.num_frames)
    asked = MODELS[args.model_type](questions, args.modality)
    llm = LLM(**(asdict(asked.engine_args) | {"seed": args.seed}))
    prompts = asked.prompts if args.use_different_prompt_per_request else asked.prompts[:1]
    params = SamplingParams(temperature=0.2, max_tokens=10, stop_token_ids=asked.stop_token_ids)
    if asked.sampling_params:
        params = [asked.sampling_params[index % len(asked.sampling_params)] for index in range(args.num_prompts)]
    inputs = inputs_of(prompts, args.modality, data)
    with timed(args.time_generate):
        outputs = llm.generate(inputs, sampling_params=params)
    for output in outputs:
        print(output.outputs[0].text)


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="One picture or one video.")
    parser.add_argument("--model-type", "-m", default="llava", choices=MODELS.keys())
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--modality", default="image", choices=["image", "video"])
    parser.add_argument("--num-frames", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--image-repeat-prob", type=float, default=None)
    parser.add_argument("--disable-mm-preprocessor-cache", action="store_true")
    parser.add_argument("--time-generate", action="store_true")
    parser.add_argument("--use-different-prompt-per-request", action="store_true")
    args = parser.parse_args()
    main()
