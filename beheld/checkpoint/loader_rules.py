"""How transformers' loader names the weights of a checkpoint, and what it makes of them."""

from __future__ import annotations

from typing import Any


class LoaderRules:
    """The rules by which weights of a checkpoint become parameters of a model.

    Args:
        model: the model; its classes state the rules.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix

    def target(self, name: str, known: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Return the parameter that a weight becomes, the first one if it becomes several, and the conversion if any.

        Args:
            name: the weight's name in the checkpoint.
            known: the model's parameters by name; None leaves open whether the base model's prefix belongs there.
        """
        from transformers.core_model_loading import rename_source_key

        prefix = None if known is None else self._prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, known)
        if known is not None and target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        return target, None if pattern is None else self._by_pattern[pattern]
