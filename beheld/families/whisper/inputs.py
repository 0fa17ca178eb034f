"""Whisper: a prompt is what the decoder continues; the audio belongs to its start token.

    <|startofprev|> earlier text <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>

Text before the start token and everything after it may be left out. Without a task the model chooses language and task
itself; with one, and without <|notimestamps|>, it writes timestamps by the rules of TimestampRule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.checkpoint.info import added_tokens
from beheld.core.errors import ModelError
from beheld.core.sampling import TimestampRule
from beheld.core.speech import SpeechForm, SpeechTokens
from beheld.families.inputs import AnswerRules, FamilyInputs

START = "<|startoftranscript|>"


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Compute the spectrogram of one window, filled up with silence or cut; see families.inputs.Call.

    The mask says which of its frames are heard; the model does not take it.
    """
    extractor = processor.feature_extractor
    whole = {"padding": "max_length", "truncation": True, "return_attention_mask": True, "return_tensors": "pt"}
    made = extractor([item], **{**options, **whole, "sampling_rate": extractor.sampling_rate})
    start = processor.tokenizer.convert_tokens_to_ids(START)
    return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}, (start,)


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Insert the start token, if missing, before the text."""
    return text if START in text else START + text


def rules(prompt_ids: Sequence[int], generation: Mapping[str, Any]) -> AnswerRules:
    """Return the rules for the answer to a prompt; see FamilyInputs.

    The checkpoint's suppressed tokens contain those of language and task, which the model must write if the prompt
    does not name the task.
    """
    none = generation.get("no_timestamps_token_id")
    end = generation.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if not isinstance(none, int) or not isinstance(end, int):
        return AnswerRules()
    tasks = frozenset((generation.get("task_to_id") or {}).values())
    ids, start = list(prompt_ids), generation.get("decoder_start_token_id")
    after = ids[len(ids) - 1 - ids[::-1].index(start) :] if isinstance(start, int) and start in ids else []
    # Models of English alone have no tokens of tasks; their transcripts start at once.
    named = not tasks.isdisjoint(after) if generation.get("is_multilingual", bool(tasks)) else True
    if not named:
        return AnswerRules(spared_from=end)
    if none in after:
        return AnswerRules()
    latest = generation.get("max_initial_timestamp_index")
    return AnswerRules(timestamps=TimestampRule(none + 1, end, latest if isinstance(latest, int) else None))


def speech_tokens(path: Path) -> SpeechTokens:
    """Read the tokens of transcripts; see SpeechForm.

    Raises:
        ModelError: the checkpoint's files lack one.
    """
    generation, ids = read_json(path / "generation_config.json"), added_tokens(path)
    # Older checkpoints have another name for it.
    silence = ids.get("<|nospeech|>", ids.get("<|nocaptions|>"))
    config = read_json(path / "config.json")
    try:
        return SpeechTokens(
            start=ids[START],
            before=ids["<|startofprev|>"],
            tasks=generation.get("task_to_id") or {},
            plain=ids["<|notimestamps|>"],
            first=ids["<|notimestamps|>"] + 1,
            end=ids["<|endoftext|>"],
            languages={name[2:-2]: token for name, token in (generation.get("lang_to_id") or {}).items()},
            window_s=float(read_json(path / "preprocessor_config.json").get("chunk_length") or 30),
            silence=silence,
            alignment_heads=alignment_heads(generation.get("alignment_heads"), config),
            median_width=median_width(config),
        )
    except KeyError as error:
        raise ModelError(
            f"The tokenizer has no token {error.args[0]!r}, which transcripts need.", "Fetch its files again."
        ) from error


def alignment_heads(given: Any, config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Read generation_config.json's pairs (decoder layer, head) of a model with this config.json; see SpeechTokens.

    Raises:
        ModelError: they are something else, or the model has no such head.
    """
    pairs = [] if given is None else given
    most = config.get("decoder_layers", 0), config.get("decoder_attention_heads", 0)
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(part) is int and 0 <= part < limit for part, limit in zip(pair, most, strict=True))
        for pair in pairs
    ):
        raise ModelError(
            f"generation_config.json: alignment_heads must be pairs [layer, head] of this model, got {given!r:.100}.",
            "Fetch the file again.",
        )
    return tuple((layer, head) for layer, head in pairs)


def median_width(config: Mapping[str, Any]) -> int:
    """Read how many states config.json's median filter has; see SpeechTokens.

    Raises:
        ModelError: it is no odd number.
    """
    width = config.get("median_filter_width", 7)
    if type(width) is not int or width < 1 or width % 2 == 0:
        raise ModelError(
            f"config.json: median_filter_width must be an odd number, got {width!r:.100}.", "Fetch the file again."
        )
    return width


INPUTS = FamilyInputs(
    placeholders={"audio": START},
    call=call,
    rewrite=rewrite,
    rewritten_ends="written",
    most={"audio": 1},
    rules=rules,
    speech=SpeechForm(tokens=speech_tokens),
    closes="its decoder starts a new transcript",
)
