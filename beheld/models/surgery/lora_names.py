"""Names of a checkpoint's own layout in adapters: what was trained with the checkpoint's own code has its names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_WEIGHT = ".weight"


class PublishedNames:
    """Finds the layers that a layer of the checkpoint's layout becomes when it is loaded.

    Args:
        model: the loaded model, by whose rules transformers' loader names and splits weights.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def parts(self, path: str, up_Or: Tensor) -> dict[str, Tensor]:
        """Return, by the paths of the loaded layers, the rows of the matrix out of the rank that each of them has.

        A layer is split by its outputs, as its weight (O, I) is; all parts read what the matrix into the rank gives.

        Args:
            path: the layer's path in the checkpoint.
            up_Or: the matrix out of the rank.

        Raises:
            Exception: whatever a rule of the loader raises where the matrix does not fit it.
        """
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(path + _WEIGHT, self._renamings, self._converters)
        if pattern is None:
            return {target.removesuffix(_WEIGHT): up_Or}
        rule = self._by_pattern[pattern]
        found: dict[str, Any] = {pattern: [up_Or]}
        for operation in rule.operations:
            found = operation.convert(
                found,
                source_patterns=rule.source_patterns,
                target_patterns=rule.target_patterns,
                full_layer_name=target,
                model=self._model,
                config=self._model.config,
                missing_keys=None,
            )
        # The path has the first of the names in place of what they replace.
        first = next(iter(found))
        before, _, after = target.partition(first)
        return {f"{before}{name}{after}".removesuffix(_WEIGHT): part for name, part in found.items()}
