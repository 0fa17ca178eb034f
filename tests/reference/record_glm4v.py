"""Records the greedy answers of GLM-4V-9B's published code to a folder of tests.reference.prepare.

    python record_glm4v.py FOLDER CODE OUTPUTS.json

CODE holds the repository's configuration_chatglm.py, modeling_chatglm.py, tokenization_chatglm.py and visual.py; they
run in an environment of their own with transformers 4.44 and tiktoken. Each answer is computed without a cache, in
float32. OUTPUTS.json has also what the code makes of texts, of conversations and of one image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import published

TEXTS = (
    "What is in this picture?",
    " Zwei  Leerzeichen,\n\n ein Umbruch\t2026 and 12345.6",
    "これは絵です。 🙂 it's I'LL don't",
    "\n\nx \r\n y",
    "[gMASK]<sop><|user|>\nHi<|endoftext|><|assistant|>",
    "",
)
# Messages: role, content, whether an image comes with it.
CONVERSATIONS: tuple[tuple[tuple[str, str, bool], ...], ...] = (
    (("user", "Hi!", False),),
    (("user", "What is it?", True),),
    (
        ("system", "Be brief.", False),
        ("user", "\n\nWhat?", False),
        ("assistant", "\nThis.", False),
        ("user", "?", True),
    ),
    (("user", " <|user|> is <|endoftext|> and <|begin_of_image|><|endoftext|><|end_of_image|>", True),),
)


class Published:
    """The code with a folder's checkpoint."""

    def __init__(self, folder: Path, code: Path) -> None:
        import torch
        from safetensors.torch import load_file

        # The decorator would read the source's file again.
        names = ("configuration", "visual", "modeling", "tokenization")
        modules = published.load_code(
            code, "chatglm", names, lambda name, source: source.replace("@torch.jit.script\n", "")
        )
        checkpoint = folder / "checkpoint"
        self.raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        settings = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
        left_out = ("torch_dtype", "auto_map", "attn_implementation")
        given = {name: value for name, value in self.raw.items() if name not in left_out}
        config = modules["configuration"].ChatGLMConfig(**given, torch_dtype=torch.float32)
        self.model = modules["modeling"].ChatGLMForConditionalGeneration(config, empty_init=False).eval()
        weights = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
        self.model.load_state_dict(weights)
        tokenizer = modules["tokenization"].ChatGLM4Tokenizer
        self.tokenizer = tokenizer.from_pretrained(str(checkpoint), image_size=settings["image_size"])

    def pixels(self, image: Any) -> Any:
        """Return the tower's input (1, 3, side, side)."""
        talk = [{"role": "user", "image": image, "content": "x"}]
        return self.tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)["images"]

    def expanded(self, ids: list[int]) -> list[int]:
        """Return a prompt's ids with one for each embedding."""
        begin, end = self.raw["boi_token_id"], self.raw["eoi_token_id"]
        if begin not in ids:
            return ids
        vision, place = self.raw["vision_config"], ids.index(begin)
        assert ids[place + 2] == end
        count = (vision["image_size"] // vision["patch_size"] // 2) ** 2
        return ids[: place + 1] + ids[place + 1 : place + 2] * count + ids[place + 2 :]

    def answer(self, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
        """Answer one case; see published.record."""
        import torch
        from PIL import Image

        ids = self.tokenizer(case["prompt"])["input_ids"]
        images = [self.pixels(Image.open(folder / name).convert("RGB")) for name in case["images"]]
        seen = {"images": torch.cat(images)} if images else {}
        found = published.greedy(self.model, torch.tensor([ids]), case["max_tokens"], seen)
        return {"prompt_token_ids": self.expanded(ids), **found}

    def further(self, folder: Path) -> dict[str, Any]:
        """Return what the code makes of TEXTS, CONVERSATIONS and the image of the case "one_image"."""
        import torch
        from PIL import Image

        image = Image.open(folder / "one_image_0.png").convert("RGB")
        talks = [
            [{"role": role, "content": content, **({"image": image} if seen else {})} for role, content, seen in talk]
            for talk in CONVERSATIONS
        ]
        pixels = self.pixels(image)
        with torch.inference_mode():
            embeds = self.model.transformer.vision(pixels)[0]
        return {
            "texts": [[text, self.tokenizer(text)["input_ids"]] for text in TEXTS],
            "conversations": [
                [talk, self.expanded(self.tokenizer.apply_chat_template(made, add_generation_prompt=True)[0])]
                for talk, made in zip(CONVERSATIONS, talks, strict=True)
            ],
            "pixels": [round(value, 5) for value in pixels[0, :, ::7, ::7].flatten().tolist()],
            "embeds": [round(value, 5) for value in embeds.flatten().tolist()],
        }


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    made = Published(folder, code)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        return made.answer(folder, case)

    return answer


def further(folder: Path, code: Path) -> dict[str, Any]:
    """Return what is recorded beside the cases."""
    return Published(folder, code).further(folder)


if __name__ == "__main__":
    published.record("glm4v_9b", answers, __doc__, further)
