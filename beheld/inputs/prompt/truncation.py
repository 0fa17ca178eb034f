"""How prompts that are longer than wanted are cut, and texts that are shorter are filled up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import ParamsError
from beheld.core.media import MediaRef
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.inputs.prompt.tokenizer import PromptTokenizer
from beheld.inputs.request_forms import Chat, PromptText


class Truncation:
    """Cuts prompts to as many tokens as their parameters say.

    Args:
        info: of the model.
        config: the engine's.
        tokenizer: of the prompts.
    """

    def __init__(self, info: ModelInfo, config: EngineConfig, tokenizer: PromptTokenizer) -> None:
        self._info = info
        self._config = config
        self._tokenizer = tokenizer

    def most(self, params: SamplingParams | PoolingParams) -> int | None:
        """Return how many ids of a text are needed; None for all, if the last ones are needed."""
        return self._config.max_model_len if params.truncate_prompt_tokens is None else None

    def keep(self, params: SamplingParams | PoolingParams) -> int | None:
        """Return how many tokens of a prompt are kept; None for all. -1 keeps as many as leave room for the answer."""
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > self._config.max_model_len and not self._in_parts():
            raise ParamsError(
                "truncate_prompt_tokens value is greater than max_model_len.",
                "Please request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        if keep != -1:
            return keep
        answer = (params.max_tokens or 1) if isinstance(params, SamplingParams) else 0
        return max(1, self._config.max_model_len - answer)

    def _in_parts(self) -> bool:
        """Return whether texts longer than the model reads are read in parts."""
        return self._info.pooler is not None and self._info.pooler.longest is not None

    def truncated(
        self,
        ids: Sequence[int],
        params: SamplingParams | PoolingParams,
        media: Sequence[MediaRef],
        text: PromptText | None,
    ) -> Sequence[int]:
        """Return a prompt's ids, cut to as many as the parameters say.

        Raises:
            ParamsError: the prompt has media.
        """
        ends = self._tokenizer.ends()[1] if text is not None and text.ends else ()
        last = None if self._info.pooler is None else self._info.pooler.last_id
        # A text may end with the same token, and gets another; ids are a whole prompt that may have it already.
        if last is not None and (text is not None or list(ids[-1:]) != [last]):
            ids, ends = [*ids, last], (*ends, last)
        keep = self.keep(params)
        if keep is None or keep >= len(ids):
            return ids if media else self._filled(ids)
        if media:
            raise ParamsError("truncate_prompt_tokens cannot cut a prompt with media.", param="truncate_prompt_tokens")
        return self._filled(self.cut(ids, params, ends))

    def with_shorter_document(self, asked: Chat, num_ids: int, params: SamplingParams | PoolingParams) -> Chat | None:
        """Return a pair's conversation with less of its document, if truncation cuts its prompt of `num_ids` ids.

        A template may put the query, or what the score is read at, after the document. None with a tokenizer that does
        not say where its tokens stand.

        Raises:
            ParamsError: the rest of the prompt leaves no room for the document.
        """
        keep = self.keep(params)
        last = None if self._info.pooler is None else self._info.pooler.last_id
        excess = 0 if keep is None else num_ids + (last is not None) - keep
        place = next((i for i, message in enumerate(asked.messages) if message.get("role") == "document"), None)
        fast = getattr(self._tokenizer.inner, "is_fast", False)
        if excess <= 0 or place is None or not isinstance(params, PoolingParams) or not fast:
            return None
        document = asked.messages[place]
        content, messages = document.get("content"), list(asked.messages)
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            return None
        for index, part in reversed(list(enumerate(parts))):
            num = len(self._tokenizer.plain_ids(part["text"]))
            parts[index] = {**part, "text": self._shorter(part["text"], num, num - excess) if num > excess else ""}
            excess -= num
            if excess <= 0:
                break
        else:
            raise ParamsError(
                f"truncate_prompt_tokens is {keep}, and the query with its template takes as many tokens.",
                "Keep more tokens, or ask a shorter query.",
                param="truncate_prompt_tokens",
            )
        messages[place] = {**document, "content": parts[0]["text"] if isinstance(content, str) else parts}
        return replace(asked, messages=messages)

    def _shorter(self, text: str, num: int, most: int) -> str:
        """Return the beginning of a document of `num` ids that is about `most` ids long, and shorter than it."""
        found = self._tokenizer.cut(text, most, plain=True)
        # A character of several ids is never cut, and a prompt's ids at the edges of its parts are not a part's alone.
        return found if len(found) < len(text) else text[: len(text) * most // num]

    def _filled(self, ids: Sequence[int]) -> Sequence[int]:
        """Return a text's ids, filled up to as many as the model was trained with, if it reads those as well."""
        wanted = None if self._info.pooler is None else self._info.pooler.filled_to
        if wanted is None or len(ids) >= wanted:
            return ids
        pad = getattr(self._tokenizer.inner, "pad_token_id", None)
        pad = self._info.pad_id if pad is None else pad
        return ids if pad is None else [*ids, *[int(pad)] * (wanted - len(ids))]

    def cut(
        self, ids: Sequence[int], params: SamplingParams | PoolingParams, after: Sequence[int] = ()
    ) -> Sequence[int]:
        """Return the ids that truncation keeps: the last of a prompt to be answered, the first of one to be pooled.

        With `truncation_side="right"`, a prompt to be answered keeps its first ones, too.

        Args:
            after: the ids that the tokenizer adds at the end of a text; a prompt to be pooled still ends with them.
        """
        keep = self.keep(params)
        if keep is None or keep >= len(ids):
            return ids
        if isinstance(params, PoolingParams):
            return [*ids[: max(0, keep - len(after))], *after][:keep]
        return ids[:keep] if params.truncation_side == "right" else ids[len(ids) - keep :]
