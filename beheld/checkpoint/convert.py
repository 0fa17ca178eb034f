"""Configurations in another layout than the one of the classes that read them.

A family converts the layouts that it knows (`Family.convert`) and may bring a class of its own (`Family.definition`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError
from beheld.families import registry


def family_of_config(raw: Mapping[str, Any]) -> str:
    """The family of a config.json's content, as the registry names it."""
    return registry.find(raw.get("model_type"), raw.get("architectures") or ())


def converted(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Model type and content of the configuration that `raw` stands for, if its family converts this layout.

    Raises:
        ModelError: it lacks an entry without which nothing can be said of the model, or the family refuses it.
    """
    convert = registry.facts(family_of_config(raw)).convert.get(raw.get("model_type") or "")
    if convert is None:
        return None
    try:
        return convert(raw)
    except ModelError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json is of the type {raw['model_type']!r}, but cannot be read as one: {error!r}.",
            "Fetch the checkpoint again.",
        ) from error


def read_here(raw: Mapping[str, Any]) -> Any | None:
    """The configuration that beheld makes of `raw` itself; None if transformers reads the file.

    Raises:
        ModelError: as `converted`.
    """
    own = registry.own_class(family_of_config(raw), "config")
    if own is not None:
        return own.from_dict(dict(raw))
    known = converted(raw)
    if known is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(known[0], **known[1])


def own_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for transformers' loaders, which would read config.json themselves: `config`, if beheld reads it."""
    found = read_here(raw)
    return {} if found is None else {"config": found}
