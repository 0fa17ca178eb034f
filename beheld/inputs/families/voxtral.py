"""Voxtral: sounds in windows of thirty seconds, each filled up; a conversation in the form of Mistral's own tokenizer.

The checkpoint brings neither a chat template nor a processor for prompts with sound: both live in the library
mistral-common, which is not needed here. The template below writes what that library writes (see docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from beheld.checkpoint.resolve import read_json
from beheld.inputs.families import Family

_TEMPLATE = """
{%- if tools -%}{{ raise_exception('Tools cannot be told to this model yet') }}{%- endif -%}
{{- '<s>' -}}
{%- set turn = namespace(last='', system=false) -%}
{%- for message in messages -%}
{%- if message.role == turn.last -%}
{{ raise_exception('Two messages of one role follow each other; join them') }}
{%- endif -%}
{%- set turn.last = message.role -%}
{%- if message.role == 'user' -%}{{- '[INST]' -}}
{%- elif message.role == 'system' -%}{{- '[SYSTEM_PROMPT]' -}}{%- set turn.system = true -%}
{%- elif message.role != 'assistant' -%}
{{ raise_exception('The roles are system, user and assistant') }}
{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' and turn.system -%}
{{ raise_exception('This model takes either a system message or sounds, not both') }}
{%- elif part.type == 'audio' -%}{{- '[BEGIN_AUDIO][AUDIO]' -}}
{%- elif part.type == 'text' -%}
{%- if loop.previtem is defined and loop.previtem.type == 'text' -%}{{- '\n\n' -}}{%- endif -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'user' -%}{{- '[/INST]' -}}
{%- elif message.role == 'system' -%}{{- '[/SYSTEM_PROMPT]' -}}
{%- elif not (loop.last and not add_generation_prompt) -%}{{- '</s>' -}}
{%- endif -%}
{%- endfor -%}
"""
_RATE = 12.5
# The processor's own defaults, which older versions of transformers keep where only its own methods find them.
_WINDOWS = {"padding": True, "truncation": False, "pad_to_multiple_of": 480000, "max_source_positions": 3000}


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one sound; see families.Call."""
    extractor = processor.feature_extractor
    own = {**_WINDOWS, "sampling_rate": extractor.sampling_rate, **options}
    frames = int(own.pop("max_source_positions"))
    features = processor._retrieve_input_features([item], frames, **own)
    seconds = features.shape[0] * frames * extractor.hop_length / extractor.sampling_rate
    count = round(seconds * _embeds_per_second(processor.tokenizer.name_or_path))
    return {"input_features": features}, processor.audio_token * count


@cache
def _embeds_per_second(folder: str) -> float:
    stated = read_json(Path(folder) / "tekken.json").get("audio")
    return float(stated.get("frame_rate", _RATE)) if isinstance(stated, Mapping) else _RATE


FAMILY = Family(markers={"audio": "[BEGIN_AUDIO][AUDIO]"}, template=_TEMPLATE, call=call)
