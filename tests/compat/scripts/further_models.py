"""A script as users of vLLM write them: further models, with the options their examples give."""

from dataclasses import asdict
from typing import NamedTuple

from vllm import LLM, EngineArgs, SamplingParams
from vllm.assets.image import ImageAsset
from vllm.assets.video import VideoAsset
from vllm.multimodal.image import convert_image_mode
from vllm.utils.argparse_utils import FlexibleArgumentParser


class Asked(NamedTuple):
    engine_args: EngineArgs
    prompts: list[str]


def cohere(name: str, mark: str, questions: list[str], **options) -> Asked:
    turn = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    return Asked(EngineArgs(model=name, **options), [turn.format(mark + question) for question in questions])


def run_aya_vision(questions: list[str], modality: str) -> Asked:
    return cohere(
        "CohereForAI/aya-vision-8b",
        "<image>",
        questions,
        max_model_len=2048,
        max_num_seqs=2,
        mm_processor_kwargs={"crop_to_patches": True},
        limit_mm_per_prompt={modality: 1},
    )


def run_command_a_vision(questions: list[str], modality: str) -> Asked:
    return cohere(
        "CohereLabs/command-a-vision-07-2025",
        "<|IMG_PATCH|>",
        questions,
        max_model_len=32768,
        tensor_parallel_size=4,
        limit_mm_per_prompt={modality: 1},
    )


def run_ernie45_vl(questions: list[str], modality: str) -> Asked:
    engine_args = EngineArgs(
        model="baidu/ERNIE-4.5-VL-28B-A3B-PT",
        max_model_len=4096,
        max_num_seqs=5,
        limit_mm_per_prompt={modality: 1},
        trust_remote_code=True,
    )
    mark = {
        "image": "Picture 1:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        "video": "Video 1:<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
    }[modality]
    return Asked(engine_args, [f"<|begin_of_sentence|>User: {q}{mark}\nAssistant: " for q in questions])


def run_gemma3n(questions: list[str], modality: str) -> Asked:
    engine_args = EngineArgs(
        model="google/gemma-3n-E2B-it",
        max_model_len=2048,
        max_num_seqs=2,
        limit_mm_per_prompt={modality: 1},
        enforce_eager=True,
    )
    turn = "<start_of_turn>user\n<image_soft_token>{}<end_of_turn>\n<start_of_turn>model\n"
    return Asked(engine_args, [turn.format(question) for question in questions])


def glm(name: str, questions: list[str], modality: str, **options) -> Asked:
    engine_args = EngineArgs(
        model=name,
        max_model_len=4096,
        max_num_seqs=2,
        mm_processor_kwargs={"size": {"shortest_edge": 12544, "longest_edge": 47040000}, "fps": 1},
        limit_mm_per_prompt={modality: 1},
        enforce_eager=True,
        **options,
    )
    mark = f"<|begin_of_{modality}|><|{modality}|><|end_of_{modality}|>"
    head = "[gMASK]<sop><|system|>\nYou are a helpful assistant.<|user|>\n"
    return Asked(engine_args, [f"{head}{mark}{question}<|assistant|>assistant\n" for question in questions])


def run_glm4_1v(questions: list[str], modality: str) -> Asked:
    return glm("zai-org/GLM-4.1V-9B-Thinking", questions, modality)


def run_glm4_5v(questions: list[str], modality: str) -> Asked:
    return glm("zai-org/GLM-4.5V", questions, modality, tensor_parallel_size=4)


def run_glm4_5v_fp8(questions: list[str], modality: str) -> Asked:
    return glm("zai-org/GLM-4.5V-FP8", questions, modality, tensor_parallel_size=4)


def run_hunyuan_vl(questions: list[str], modality: str) -> Asked:
    engine_args = EngineArgs(model="tencent/HunyuanOCR", max_model_len=8192, limit_mm_per_prompt={modality: 1})
    mark = "".join(f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 102, 101))
    return Asked(engine_args, [f"<｜hy_begin▁of▁sentence｜>{mark}{question}<｜hy_User｜>" for question in questions])


MODELS = {
    "aya_vision": run_aya_vision,
    "command_a_vision": run_command_a_vision,
    "ernie45_vl": run_ernie45_vl,
    "gemma3n": run_gemma3n,
    "glm4_1v": run_glm4_1v,
    "glm4_5v": run_glm4_5v,
    "glm4_5v_fp8": run_glm4_5v_fp8,
    "hunyuan_vl": run_hunyuan_vl,
}


def main(args) -> None:
    if args.modality == "image":
        data = convert_image_mode(ImageAsset("cherry_blossom").pil_image, "RGB")
    else:
        asset = VideoAsset(name="baby_reading", num_frames=args.num_frames)
        data = [(asset.np_ndarrays, asset.metadata)]
    asked = MODELS[args.model_type](["What is this?"], args.modality)
    llm = LLM(**asdict(asked.engine_args) | {"seed": args.seed})
    inputs = {"prompt": asked.prompts[0], "multi_modal_data": {args.modality: data}}
    for output in llm.generate(inputs, sampling_params=SamplingParams(temperature=0.2, max_tokens=8)):
        print(output.outputs[0].text)


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--model-type", "-m", choices=MODELS.keys())
    parser.add_argument("--modality", default="image", choices=["image", "video"])
    parser.add_argument("--num-frames", type=int, default=16)
    parser.add_argument("--seed", type=int)
    main(parser.parse_args())
