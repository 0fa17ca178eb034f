"""Completions with a `suffix`: the model fills in what stands between, if its tokenizer has marks for that."""

from __future__ import annotations

from typing import Any

from beheld.server.errors import HttpError
from beheld.server.schema import CompletionRequest

# The marks of models that fill in -> how a prompt is written with them.
FORMS: dict[tuple[str, ...], str] = {
    # Qwen's coders, CodeGemma.
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"): "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
    # StarCoder, Granite.
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "<fim_prefix>{before}<fim_suffix>{after}<fim_middle>",
    # DeepSeek's coders.
    (
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
    ): "<｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>",
    # Codestral.
    ("[SUFFIX]", "[PREFIX]"): "[SUFFIX]{after}[PREFIX]{before}",
}


def filled(body: CompletionRequest, tokenizer: Any, most: int) -> CompletionRequest:
    """The same request with its suffix in the prompts.

    Args:
        most: the most letters of the suffix in all prompts together; a body says it once.

    Raises:
        HttpError: the model has no marks for it, it is too long, or a field speaks of the prompt as it was sent.
    """
    if not body.suffix:
        return body
    known = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    form = next((form for marks, form in FORMS.items() if known.issuperset(marks)), None)
    if form is None:
        raise HttpError(
            400,
            "This model has no tokens that mark a text to fill in, so it takes no suffix.",
            "Leave the suffix out, or ask a model that was trained to fill in, such as Qwen2.5-Coder.",
            param="suffix",
        )
    if body.echo or body.prompt_embeds:
        name = "echo" if body.echo else "prompt_embeds"
        raise HttpError(400, f"A suffix and {name} cannot be combined.", "Leave one of them out.", param="suffix")
    texts = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if not all(isinstance(text, str) for text in texts):
        raise HttpError(400, "A suffix needs a prompt of text.", "Send the prompt as text.", param="prompt")
    if len(texts) * len(body.suffix) > most:
        raise HttpError(
            400,
            f"The suffix stands in each of {len(texts)} prompts, which makes more than {most} letters.",
            "Send a shorter suffix, or fewer prompts.",
            param="suffix",
        )
    made = [form.format(before=text, after=body.suffix) for text in texts]
    return body.model_copy(update={"prompt": made[0] if isinstance(body.prompt, str) else made, "suffix": None})
