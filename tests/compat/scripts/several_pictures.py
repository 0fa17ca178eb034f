"""A script as users of vLLM write them: several pictures, given to generate or to chat."""

import os
from argparse import Namespace
from dataclasses import asdict
from typing import NamedTuple, Optional

from huggingface_hub import snapshot_download
from PIL.Image import Image
from transformers import AutoProcessor, AutoTokenizer
from vllm import LLM, EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.utils import fetch_image
from vllm.utils import FlexibleArgumentParser

QUESTION = "What is the content of each image?"
URLS = ["https://host.test/a%20picture%20%28one%29.jpg", "http://host.test/deeper/two.jpg"]


class Asked(NamedTuple):
    engine_args: EngineArgs
    prompt: str
    image_data: list[Image]
    stop_token_ids: Optional[list[int]] = None  # noqa: UP045 - as scripts have it
    chat_template: Optional[str] = None  # noqa: UP045
    lora_requests: Optional[list[LoRARequest]] = None  # noqa: UP045


def load_llava(question: str, urls: list[str]) -> Asked:
    folder = snapshot_download("llava-hf/llava-1.5-7b-hf")
    assert os.path.isfile(os.path.join(folder, "config.json"))
    engine_args = EngineArgs(
        model=folder,
        tokenizer_mode="slow",
        trust_remote_code=True,
        max_model_len=1024,
        max_num_seqs=2,
        tensor_parallel_size=2,
        enforce_eager=True,
        limit_mm_per_prompt={"image": len(urls)},
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompt = "USER: " + "<image>\n" * len(urls) + question + " ASSISTANT:"
    stop = [tokenizer.convert_tokens_to_ids(token) for token in ("</s>", "<pad>")]
    template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
        "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    )
    return Asked(engine_args, prompt, [fetch_image(url) for url in urls], stop, template)


def load_qwen2_vl(question: str, urls: list[str]) -> Asked:
    try:
        from qwen_vl_utils import process_vision_info
    except ModuleNotFoundError:
        print("WARNING: `qwen-vl-utils` not installed, input images will not be automatically resized.")
        process_vision_info = None
    name = "Qwen/Qwen2-VL-7B-Instruct"
    engine_args = EngineArgs(
        model=name,
        max_model_len=2048 if process_vision_info is None else 1024,
        max_num_seqs=5,
        dtype="bfloat16",
        limit_mm_per_prompt={"image": len(urls)},
        mm_processor_kwargs={"min_pixels": 28 * 28, "max_pixels": 1280 * 28 * 28},
    )
    shown = [{"type": "image", "image": url} for url in urls]
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": [*shown, {"type": "text", "text": question}]},
    ]
    processor = AutoProcessor.from_pretrained(name)
    prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if process_vision_info is None:
        pictures = [fetch_image(url) for url in urls]
    else:
        pictures, _ = process_vision_info(messages, return_video_kwargs=False)
    return Asked(engine_args, prompt, pictures)


def load_adapted(question: str, urls: list[str]) -> Asked:
    asked = load_llava(question, urls)
    path = os.path.join(asked.engine_args.model, "vision-lora")
    asked.engine_args.enable_lora = True
    asked.engine_args.max_lora_rank = 320
    return asked._replace(lora_requests=[LoRARequest("vision", 1, path)])


MODELS = {"adapted": load_adapted, "llava": load_llava, "qwen2_vl": load_qwen2_vl}


def start(asked: Asked, seed: Optional[int]) -> LLM:  # noqa: UP045
    # Switch the other modalities off, to save memory.
    switched_off = {"image": 0, "video": 0, "audio": 0}
    asked.engine_args.limit_mm_per_prompt = switched_off | dict(asked.engine_args.limit_mm_per_prompt or {})
    llm = LLM(**asdict(asked.engine_args) | {"seed": seed})
    for adapter in asked.lora_requests or []:
        llm.llm_engine.add_lora(lora_request=adapter)
    return llm


def main(args: Namespace) -> None:
    asked = MODELS[args.model_type](QUESTION, URLS)
    llm = start(asked, args.seed)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=asked.stop_token_ids)
    if args.method == "generate":
        outputs = llm.generate(
            {"prompt": asked.prompt, "multi_modal_data": {"image": asked.image_data}},
            sampling_params=params,
            lora_request=asked.lora_requests,
        )
    else:
        text = {"type": "text", "text": QUESTION}
        pictures = ({"type": "image_url", "image_url": {"url": url}} for url in URLS)
        outputs = llm.chat(
            [{"role": "user", "content": [text, *pictures]}],
            sampling_params=params,
            chat_template=asked.chat_template,
            lora_request=asked.lora_requests,
        )
    for output in outputs:
        print(output.outputs[0].text)


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Several pictures.")
    parser.add_argument("--model-type", "-m", type=str, default="llava", choices=MODELS.keys())
    parser.add_argument("--method", type=str, default="generate", choices=["generate", "chat"])
    parser.add_argument("--seed", type=int, default=None)
    main(parser.parse_args())
