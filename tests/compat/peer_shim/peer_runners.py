"""What vLLM's tests of pooling and of media run models with: beheld's LLM, and transformers as the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from beheld.compat.assets import PUBLIC
from beheld.compat.llm import ScriptLLM
from beheld.core.beams import BeamSearchParams
from beheld.core.errors import UserError
from beheld.core.params import SamplingParams

# What vLLM's runner is given that has no meaning here.
_LEFT_OUT = ("dtype", "gpu_memory_utilization", "kernel_config", "attention_backend")


# How beheld becomes `vllm`, where it is not what tests see.
installing: Any = None


class VllmRunner:
    """`LLM(model, ...)` until the end of the block."""

    def __init__(self, model_name: str, *, max_model_len: int | None = 1024, seed: int = 0, **options: Any) -> None:
        for name in _LEFT_OUT:
            options.pop(name, None)
        if (tokenizer := options.pop("tokenizer_name", None)) is not None:
            options["tokenizer"] = tokenizer
        try:
            self.llm = ScriptLLM(model_name, max_model_len=max_model_len, seed=seed, **options)
        except UserError as error:
            pytest.fail(f"ABSENT: {error}", pytrace=False)

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def get_llm(self) -> ScriptLLM:
        """The engine."""
        return self.llm

    def generate(self, prompts: Any, sampling_params: Any, **options: Any) -> list[tuple[list[list[int]], list[str]]]:
        """For each prompt the ids and the texts of its answers, each with the prompt before it."""
        return [
            (
                [[*made.prompt_token_ids, *answer.token_ids] for answer in made.outputs],
                [(made.prompt or "") + answer.text for answer in made.outputs],
            )
            for made in self.llm.generate(prompts, sampling_params, **options)
        ]

    def generate_greedy(self, prompts: Any, max_tokens: int, **options: Any) -> list[tuple[list[int], str]]:
        """The ids and the text of the likeliest answers."""
        made = self.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), **options)
        return [(ids[0], texts[0]) for ids, texts in made]

    def generate_w_logprobs(
        self, prompts: Any, sampling_params: Any, include_prompt_token_ids: bool = False, **options: Any
    ) -> list[tuple[Any, ...]]:
        """Ids, text and log-probabilities of answers; of prompts their ids and log-probabilities, where asked for."""
        found = []
        for made in self.llm.generate(prompts, sampling_params, **options):
            answer = made.outputs[-1]
            ids = (made.prompt_token_ids,) if include_prompt_token_ids else ()
            of_prompt = () if sampling_params.prompt_logprobs is None else (made.prompt_logprobs,)
            found.append((list(answer.token_ids), answer.text, answer.logprobs, *ids, *of_prompt))
        return found

    def generate_greedy_logprobs(
        self, prompts: Any, max_tokens: int, num_logprobs: int | None, num_prompt_logprobs: int | None = None, **_: Any
    ) -> list[tuple[Any, ...]]:
        """The same of the likeliest answers."""
        counts = {"logprobs": num_logprobs, "prompt_logprobs": num_prompt_logprobs}
        return self.generate_w_logprobs(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, **counts))

    def generate_beam_search(
        self, prompts: Any, beam_width: int, max_tokens: int, concurrency_limit: int | None = None
    ) -> list[tuple[list[list[int]], list[str]]]:
        """The ids and the texts of the beams of each prompt."""
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        made = self.llm.beam_search(prompts, params, concurrency_limit=concurrency_limit)
        return [([each.tokens for each in one.sequences], [each.text for each in one.sequences]) for one in made]


class HfRunner:
    """transformers' model of a repository: vectors as sentence-transformers makes them, or scores of pairs."""

    def __init__(
        self, model_name: str, *_: Any, is_cross_encoder: bool = False, is_sentence_transformer: bool = False, **__: Any
    ) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
        kind = transformers.AutoModel if is_sentence_transformer else transformers.AutoModelForCausalLM
        kind = transformers.AutoModelForSequenceClassification if is_cross_encoder else kind
        self.model = kind.from_pretrained(model_name, dtype=torch.float32).eval()

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.inference_mode()
    def encode(self, texts: str | Sequence[str], *_: Any, **__: Any) -> Any:
        """The mean of the states, or the first one where the modules say so, of length 1; a list for a list."""
        if not isinstance(texts, str):
            return [self.encode(text) for text in texts]
        inputs = self.tokenizer(texts, return_tensors="pt", truncation=False, padding=False)
        states = self.model(**inputs).last_hidden_state[0]
        return torch.nn.functional.normalize(states.mean(0), dim=0).tolist()

    def wrap_device(self, inputs: Any, *_: Any) -> Any:
        """The inputs; the model is where they are."""
        return inputs

    @torch.inference_mode()
    def get_prompt_embeddings(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """The embeddings of each prompt's tokens, (positions, width)."""
        table = self.model.get_input_embeddings()
        return [table(self.tokenizer(prompt, return_tensors="pt")["input_ids"])[0] for prompt in prompts]

    def generate_greedy(self, prompts: Sequence[str], max_tokens: int, **_: Any) -> list[tuple[list[int], str]]:
        """The ids and the text of the likeliest answers, each with the prompt before it."""
        found = []
        for prompt in prompts:
            inputs = self.tokenizer(prompt, return_tensors="pt")
            ids = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[0].tolist()
            found.append((ids, self.tokenizer.decode(ids, skip_special_tokens=True)))
        return found

    @torch.inference_mode()
    def generate_greedy_logprobs(self, prompts: Sequence[str], max_tokens: int, **_: Any) -> list[list[torch.Tensor]]:
        """Of each prompt the log-probabilities (positions, tokens) of its own positions, then those of each answered
        token."""
        found = []
        for prompt in prompts:
            inputs = self.tokenizer(prompt, return_tensors="pt")
            ids = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            rows = self.model(input_ids=ids).logits[0].float().log_softmax(-1)
            length = inputs["input_ids"].shape[1]
            found.append([rows[:length], *(row[None] for row in rows[length:-1])])
        return found

    @torch.inference_mode()
    def generate_beam_search(
        self, prompts: Sequence[str], beam_width: int, max_tokens: int
    ) -> list[tuple[list[list[int]], list[str]]]:
        """The ids and the texts of the beams of each prompt."""
        found = []
        for prompt in prompts:
            inputs = self.tokenizer(prompt, return_tensors="pt")
            counts = {"num_beams": beam_width, "num_return_sequences": beam_width, "max_new_tokens": max_tokens}
            ids = self.model.generate(**inputs, **counts, do_sample=False).tolist()
            padding = self.tokenizer.pad_token_id
            ids = [[token for token in each if token != padding] for each in ids]
            found.append((ids, self.tokenizer.batch_decode(ids)))
        return found

    @torch.inference_mode()
    def predict(self, pairs: Sequence[Sequence[str]], *_: Any, **__: Any) -> torch.Tensor:
        """(N,) scores between 0 and 1 of pairs of texts."""
        made = [self.tokenizer(*pair, return_tensors="pt", truncation=False, padding=False) for pair in pairs]
        return torch.cat([self.model(**inputs).logits[0].sigmoid() for inputs in made])


class Answer(BaseModel):
    """A body of an answer; what is not in it is no attribute."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def model_validate(cls, given: Any, **_: Any) -> Any:
        """The body with its inner bodies as attributes."""
        if isinstance(given, dict):
            return cls(**{name: cls.model_validate(value) for name, value in given.items()})
        return [cls.model_validate(each) for each in given] if isinstance(given, list) else given


class BatchRequestOutput(BaseModel):
    """A line of a batch's output, with all of its fields."""

    model_config = ConfigDict(extra="forbid")

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: Any | None


@dataclass
class EmbedModelInfo:
    """A model that a test names."""

    name: str
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None
    further: dict[str, Any] = field(default_factory=dict)


def check_embeddings_close(
    *, embeddings_0_lst: Sequence[Any], embeddings_1_lst: Sequence[Any], tol: float = 1e-3, **_: Any
) -> None:
    """Vectors point in the same direction."""
    for one, other in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        near = torch.nn.functional.cosine_similarity(torch.as_tensor(one), torch.as_tensor(other), dim=0)
        assert near >= 1 - tol, f"cosine {float(near)}"


def matryoshka_fy(vectors: Sequence[Any], dimensions: int) -> list[Any]:
    """The first numbers of vectors, of length 1 again."""
    cut = torch.as_tensor(vectors)[:, :dimensions]
    return torch.nn.functional.normalize(cut, dim=-1).tolist()


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities of classes; of one class, that it is so."""
    return logits.sigmoid() if logits.shape[-1] == 1 else torch.nn.functional.softmax(logits, dim=-1)


def maxsim(query_QD: torch.Tensor, document_ND: torch.Tensor) -> torch.Tensor:
    """The sum of each query token's nearest document token."""
    return (query_QD @ document_ND.T).amax(-1).sum()


class MediaWithBytes:
    """vLLM's pair of an image and its file; our images come alone."""


def async_tensor_h2d(values: Any, dtype: Any, device: Any, **_: Any) -> torch.Tensor:
    """A tensor of these values on the device."""
    return torch.tensor(values, dtype=dtype, device=device)


def make_tensor_with_pad(rows: Sequence[Sequence[Any]], pad: Any, dtype: Any, **_: Any) -> torch.Tensor:
    """A matrix of rows that are filled up to the longest."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=dtype)


@contextmanager
def set_default_torch_num_threads(count: int) -> Iterator[None]:
    """So many threads of torch until the end of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """vLLM's fixture of that name."""
    return caplog


@pytest.fixture
def example_prompts() -> list[str]:
    """vLLM's fixture of that name."""
    return (Path(os.environ["PEER_SOURCE"]) / "tests/prompts/example.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="session")
def vllm_runner() -> Any:
    """vLLM's fixture of that name."""
    return VllmRunner


@pytest.fixture(scope="session")
def hf_runner() -> Any:
    """vLLM's fixture of that name."""
    return HfRunner


def attribute(module: str, name: str) -> Any:
    """What a module of vLLM holds under a name; None if it is not here."""
    if module.startswith("vllm.entrypoints.pooling") and module.endswith(".protocol") and name.endswith("Response"):
        return type(name, (Answer,), {})
    return _NAMES.get(name)


_NAMES: dict[str, Any] = {
    "MiB_bytes": 1 << 20,
    "VLLM_USE_RUST_FRONTEND": False,
    "ChatCompletionContentPartImageParam": dict,
    "ChatCompletionContentPartTextParam": dict,
    "version": SimpleNamespace(_prev_minor_version=lambda: "0.32"),
    "_prev_minor_version": lambda: "0.32",
    "BatchRequestOutput": BatchRequestOutput,
    "MediaWithBytes": MediaWithBytes,
    "VLLMValidationError": UserError,
    "VLLM_S3_BUCKET_URL": PUBLIC,
    "compute_maxsim_score": maxsim,
    "async_tensor_h2d": async_tensor_h2d,
    "make_tensor_with_pad": make_tensor_with_pad,
    "set_default_torch_num_threads": set_default_torch_num_threads,
    "LogprobsMode": Literal["raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"],
    "LOGITSPROCS_GROUP": "vllm.logits_processors",
    "STR_POOLING_REJECTS_LOGITSPROCS": "Pooling models do not support custom logits processors.",
    "STR_SPEC_DEC_REJECTS_LOGITSPROCS": (
        "Custom logits processors are not supported when speculative decoding is enabled."
    ),
}
