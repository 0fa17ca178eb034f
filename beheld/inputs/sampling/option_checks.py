"""Checks the engine's input options at start, before the first request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.info import read_info
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import ConfigError, ParamsError
from beheld.core.media import MODALITIES
from beheld.core.value_checks import nearest, whole
from beheld.families import registry
from beheld.inputs.media import decode, video
from beheld.inputs.media.processor import ItemProcessor
from beheld.inputs.prompt import template
from beheld.inputs.prompt.tokenizer import PromptTokenizer
from beheld.inputs.sampling.resolve_sampling import HABITUAL, RECOMMENDED, recommended


def check(args: EngineArgs) -> None:
    """Check override_generation_config, media_io_kwargs and chat_template.

    Raises:
        ConfigError: a name in one of the first two is unknown, or a value is out of range.
        TemplateError: chat_template is neither a template nor a readable file.
    """
    _overrides(args)
    _io(args.media_io_kwargs or {})
    if args.chat_template:
        template.text_of(args.chat_template)


def check_processor(given: Mapping[str, Any] | None, info: ModelInfo, processor: ItemProcessor) -> None:
    """Check mm_processor_kwargs; loads the processor if there are any.

    Raises:
        ConfigError: the processor has no such option or does not accept its value, or the model takes no media.
    """
    name = "mm_processor_kwargs"
    if not given:
        return
    if not info.modalities:
        raise ConfigError(f"{name} has no effect: {info.name!r} accepts text only.", "Leave it out.", param=name)
    try:
        for modality in info.modalities:
            processor.options(modality, given)
    except ParamsError as error:
        raise ConfigError(error.reason, error.remedy, param=name, detail=error.detail) from error


def load_for_options(args: EngineArgs, info: ModelInfo | None = None) -> Any:
    """Check mm_processor_kwargs before the weights are loaded; return the processor if it was loaded for that.

    Raises:
        ConfigError: see check_processor.
        ModelError: there is no such model, or it has no processor.
    """
    if not args.mm_processor_kwargs:
        return None
    info = info or read_info(resolve(args), args)
    family = registry.inputs_of(info.family, Path(info.path))
    words = PromptTokenizer.of(None, info, family)
    processor = ItemProcessor(info, args, family, words, info.checkpoint_dtype)
    check_processor(args.mm_processor_kwargs, info, processor)
    return processor.loaded()


def _overrides(args: EngineArgs) -> None:
    name = "override_generation_config"
    given = args.override_generation_config or {}
    known = (*RECOMMENDED, *HABITUAL, "do_sample", "max_new_tokens")
    for key in given:
        if key not in known:
            raise _unknown(name, str(key), known)
    try:
        for key in HABITUAL:
            values = given.get(key)
            for value in values if isinstance(values, list) else (values,):
                whole(key, value, 0, optional=True)
        recommended({}, args)
    except ParamsError as error:
        raise ConfigError(f"{name}: {error.reason}", error.remedy, param=name, detail=error.detail) from error


def _io(given: Mapping[str, Any]) -> None:
    name = "media_io_kwargs"
    for modality, own in given.items():
        if modality not in MODALITIES:
            raise _unknown(name, str(modality), MODALITIES)
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name}[{modality!r}] must be a mapping, got {own!r}.", param=name)
        strange = [key for key in own if modality != "video" and (modality, key) != ("image", decode.BACKGROUND)]
        if strange:
            raise ConfigError(
                f"{name} sets {', '.join(map(repr, strange))} for {modality}, which has no such options.",
                "Leave it out; processor options belong in mm_processor_kwargs.",
                param=name,
            )
    try:
        video.FrameSampling.of(given.get("video", {}))
        if (background := given.get("image", {}).get(decode.BACKGROUND)) is not None:
            decode.background_of(background)
    except ParamsError as error:
        raise ConfigError(f"{name}: {error.reason}", error.remedy, param=name, detail=error.detail) from error


def _unknown(name: str, key: str, known: tuple[str, ...]) -> ConfigError:
    remedy = nearest(key, known) or f"Known: {', '.join(sorted(known))}."
    return ConfigError(f"{name} names the unknown {key!r}.", remedy, param=name)
