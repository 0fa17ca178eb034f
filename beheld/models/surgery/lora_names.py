"""Names of a checkpoint's own layout in adapters: what was trained with the checkpoint's own code has its names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.checkpoint.loader_rules import LoaderRules

_WEIGHT = ".weight"


class PublishedNames:
    """Finds the layers that a layer of the checkpoint's layout becomes when it is loaded.

    Args:
        model: the loaded model, by whose rules transformers' loader names and splits weights.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._rules = model, LoaderRules(model)

    def parts(self, path: str, up_Or: Tensor) -> dict[str, Tensor]:
        """Return, by the paths of the loaded layers, the rows of the matrix out of the rank that each of them has.

        A layer is split by its outputs, as its weight (O, I) is; all parts read what the matrix into the rank gives.

        Args:
            path: the layer's path in the checkpoint.
            up_Or: the matrix out of the rank.

        Raises:
            Exception: whatever a rule of the loader raises where the matrix does not fit it.
        """
        target, rule = self._rules.target(path + _WEIGHT)
        if rule is None:
            return {target.removesuffix(_WEIGHT): up_Or}
        found: dict[str, Any] = {rule.source_patterns[0]: [up_Or]}
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
