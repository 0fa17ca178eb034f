"""Scores of pairs: what a user gives, the prompts that are made of it, and the scores of vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from beheld.core.errors import ParamsError
from beheld.core.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from beheld.core.pooling import PoolerInfo
from beheld.inputs.pipeline import Chat, Pair, PromptType

if TYPE_CHECKING:
    from torch import Tensor

Scored = str | Mapping[str, Any]

# Texts one after another, with each item's placeholder where it stands.
_JOINED = "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"


def pairs(first: Any, second: Any) -> tuple[list[Scored], list[Scored]]:
    """Return both sides of all pairs, equally long: one to one, one to many, or many to as many.

    Raises:
        ParamsError: the numbers differ, or an entry is neither a text nor a mapping with content or a prompt.
    """
    sides = [_entries(name, side) for name, side in (("data_1", first), ("data_2", second))]
    left, right = sides
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ParamsError(
            f"There are {len(left)} entries to compare with {len(right)}.",
            "Give one and many, or as many on both sides.",
            param="data_1",
        )
    return left, right


def cut(name: str, side: Sequence[Scored], most: int | None, cut_text: Callable[[str, int], str]) -> list[Scored]:
    """Return one side of the pairs with as many tokens of each text as `most`; None for all.

    Raises:
        ParamsError: an entry is no text; `name` is what the bound is called.
    """
    if most is None:
        return list(side)
    if not all(isinstance(entry, str) for entry in side):
        raise ParamsError(f"{name} cuts texts, and one side has parts.", "Leave it out.", param="extra_kwargs")
    texts = {entry: cut_text(entry, most) for entry in side if isinstance(entry, str)}
    return [texts[entry] for entry in side if isinstance(entry, str)]


def _entries(name: str, side: Any) -> list[Scored]:
    given = list(side) if isinstance(side, list | tuple) else [side]
    if isinstance(side, Mapping) and isinstance(side.get("content"), list | tuple) and set(side) == {"content"}:
        # An older form: one mapping with a list of many single parts.
        given = [{"content": [part]} for part in side["content"]]
    if not given:
        raise ParamsError(f"{name} is empty.", "Give a text.", param=name)
    for entry in given:
        if not isinstance(entry, str) and not (
            isinstance(entry, Mapping) and {"content", "prompt", "prompt_token_ids"} & set(entry)
        ):
            raise ParamsError(
                f"{name} holds {type(entry).__name__}, which cannot be scored.",
                'Give texts, or {"content": [parts of a chat message]}.',
                param=name,
            )
    return given


def _crosses(info: PoolerInfo) -> bool:
    """Return whether the model reads both sides of a pair at once.

    Raises:
        ParamsError: it gives scores, but of several classes.
    """
    if not info.scores:
        return False
    if info.task != "classify" or info.width != 1:
        # Clients of vLLM look for the first words.
        only = "This model does not support the Scoring API"
        if info.task == "classify" and info.chosen != "token_classify":
            only = "Scoring API is only enabled for num_labels == 1"
        raise ParamsError(f"{only}. It gives scores of {info.width} classes.", "Use classify.", param="model")
    return True


class PairScores:
    """Pairs of a model: the prompts that are made of them, and their scores.

    A model with one class reads both sides at once. Of a model of vectors, each side is read alone, and a side that is
    compared with many is read once.

    Args:
        first, second: both sides, equally long.
        info: how the model pools.
        chat_template: makes the prompt of a pair, for a model that reads both at once; its messages have the roles
            "query" and "document". None joins the texts.
        template_kwargs: further variables of the template.
        salt: separates prefix caches.

    Attributes:
        prompts: what the engine reads.
        task: of the prompts.
        has_template: whether a template makes them.

    Raises:
        ParamsError: the model gives no score of a pair, or a side has no text.
    """

    def __init__(
        self,
        first: Sequence[Scored],
        second: Sequence[Scored],
        info: PoolerInfo,
        chat_template: str | None,
        template_kwargs: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> None:
        self._salt = salt
        self._crosses = _crosses(info)
        self._num_first = 0
        self.has_template = self._crosses and chat_template is not None
        if self._crosses:
            self.task = "classify"
            self.prompts: list[Any] = [
                self._pair(a, b, chat_template, template_kwargs) for a, b in zip(first, second, strict=True)
            ]
            return
        late = info.late or info.chosen == "token_embed"
        self.task = "token_embed" if late else "embed"
        self._of_vectors = _interaction if late else _cosine
        once = first[:1] if all(entry is first[0] for entry in first) else first
        self._num_first = len(once)
        self.prompts = [self._alone(entry) for entry in (*once, *second)]

    def of(self, outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """Return the scores of the pairs from the outputs of the prompts."""
        if self._crosses:
            return [ScoringRequestOutput.of(output) for output in outputs]
        first, second = outputs[: self._num_first], outputs[self._num_first :]
        return _compared(first if len(first) == len(second) else [first[0]] * len(second), second, self._of_vectors)

    def _alone(self, entry: Scored) -> PromptType | Chat:
        if isinstance(entry, str):
            made: Any = {"prompt": entry} if self._salt is None else {"prompt": entry, "cache_salt": self._salt}
            return made
        if "content" not in entry:
            return entry
        messages = [{"role": "user", "content": entry["content"]}]
        return Chat(messages, chat_template=_JOINED, content_format="string", cache_salt=self._salt)

    def _pair(
        self, first: Scored, second: Scored, chat_template: str | None, template_kwargs: Mapping[str, Any] | None
    ) -> Chat | Pair:
        if chat_template is None and isinstance(first, str) and isinstance(second, str):
            return Pair(first, second, self._salt)
        messages = []
        for role, side in (("query", first), ("document", second)):
            content = side if isinstance(side, str) else side.get("content")
            if content is None:
                raise ParamsError(
                    "A pair of this model is given as texts or contents.", 'Write {"content": [parts]}.', param="data_1"
                )
            messages.append({"role": role, "content": content})
        return Chat(
            messages,
            chat_template=chat_template or _JOINED,
            content_format=None if chat_template else "string",
            add_generation_prompt=chat_template is not None,
            template_kwargs=template_kwargs,
            cache_salt=self._salt,
        )


def _cosine(left_D: Tensor, right_D: Tensor) -> Tensor:
    """Return the cosine of two vectors."""
    import torch.nn.functional as F

    return F.cosine_similarity(left_D, right_D, dim=0)


def _interaction(left_MD: Tensor, right_ND: Tensor) -> Tensor:
    """Return the sum, over the first side's vectors, of the greatest product with one of the second's (MaxSim)."""
    return (left_MD @ right_ND.T).amax(1).sum()


def _compared(
    lefts: Sequence[PoolingRequestOutput],
    rights: Sequence[PoolingRequestOutput],
    score: Callable[[Tensor, Tensor], Tensor],
) -> list[ScoringRequestOutput]:
    """Return the score of each pair of outputs; the usage of a pair is that of both sides."""
    found = []
    for left, right in zip(lefts, rights, strict=True):
        error = left.error or right.error
        both = None if error is not None else PoolingOutput(score(left.outputs.data, right.outputs.data))
        found.append(
            ScoringRequestOutput.of(
                replace(
                    left,
                    outputs=both,  # type: ignore[arg-type]
                    prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids,
                    num_cached_tokens=left.num_cached_tokens + right.num_cached_tokens,
                    media=[*left.media, *right.media],
                    error=error,
                )
            )
        )
    return found
