"""Whether a checkpoint is used to pool, and how: its heads, sentence-transformers' settings, and the user's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.checks.safetensors import shapes_of
from beheld.checkpoint.files import read_json, read_json_list
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.core.pooling import LONGEST, DenseLayer, PoolerConfig, PoolerInfo, runner_and_convert
from beheld.families.family import Family
from beheld.utils.log import get_logger

logger = get_logger(__name__)

MODULES = "modules.json"
_CLASSIFIES, _CLASSIFIES_TOKENS = "ForSequenceClassification", "ForTokenClassification"
# Classes with another head, which neither scores here nor writes text.
_OTHER_HEADS = re.compile(
    r"For(QuestionAnswering|MultipleChoice|NextSentencePrediction|Ranking|\w*(Reward|Classification)\w*)$|RewardModel$"
)
# Entries of a sentence-transformers pooling module -> the method.
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_MODE_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
_BY_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "",
    "multi_label_classification": "sigmoid",
}
# Entries that say how wide a vector of ColBERT's is, and the file of its own code that does.
_WIDTHS = ("colbert_dim", "dim", "projection_dim")
_COLBERTS = "artifact.metadata"
# Its layer.
_LINEAR = "linear"
_METHODS = ("from_2_way_softmax", "no_post_processing")


def pooler_of(path: Path, args: EngineArgs, config: Any, family: Family) -> PoolerInfo | None:
    """Return how the checkpoint in `path` pools; None if it generates.

    Raises:
        ConfigError: an option contradicts the checkpoint.
        ModelError: the checkpoint's settings cannot be honoured; they are named.
    """
    runner, convert = runner_and_convert(args.task, args.runner, args.convert)
    architecture = (getattr(config, "architectures", None) or [""])[0]
    tokens = _entry(config, "classifier_from_token")
    classifies = architecture.endswith((_CLASSIFIES, _CLASSIFIES_TOKENS))
    own = family.pools is not None or architecture in family.late or architecture in family.headed
    cannot_generate = own or classifies or family.encodes or _is_bare(config, architecture, family)
    if runner == "generate" and cannot_generate:
        raise ConfigError(
            f"{architecture} is a pooling model and generates no text.",
            "Leave out runner, or set runner='pooling'.",
            param="runner",
        )
    modules = _modules(path)
    if not (own or classifies or tokens or modules or family.encodes or convert in ("embed", "none")):
        _refuse_other_head(architecture, family)
    if runner == "generate" or (runner == "auto" and not (cannot_generate or tokens or modules)):
        if args.override_pooler_config is not None:
            raise ConfigError(
                "override_pooler_config has no effect on a model that generates.",
                "Set runner='pooling', or leave it out.",
                param="override_pooler_config",
            )
        return None
    found = _of_family(config, convert, architecture, family) or _with_head(path, config, convert, architecture, family)
    if found is None:
        found = _with_modules(path, config, modules, architecture, family)
    limits = _sentence_settings(path)
    found = replace(found, lowercase=limits.get("do_lower_case") is True, encodes=family.encodes)
    return _overridden(found, PoolerConfig.of(args.override_pooler_config))


def _refuse_other_head(architecture: str, family: Family) -> None:
    """Refuse a class with a head that is not read: without it, such a checkpoint would answer with text.

    Raises:
        ModelError: names the class.
    """
    if _OTHER_HEADS.search(architecture) and architecture not in family.architectures:
        raise ModelError(
            f"{architecture} has a head that is not available in this version, and generates no text.",
            f"Heads of *{_CLASSIFIES} and *{_CLASSIFIES_TOKENS} are; runner='pooling' with convert='embed' gives "
            "vectors of the model without its head.",
        )


def longest(path: Path) -> int | None:
    """Return the most tokens of a text that sentence-transformers' settings allow; None if they do not say."""
    found = _sentence_settings(path).get("max_seq_length")
    return found if isinstance(found, int) and found > 0 else None


def _is_bare(config: Any, architecture: str, family: Family) -> bool:
    """Return whether the class has no head at all."""
    if family.definition is not None or architecture in family.architectures:
        return False
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = MODEL_MAPPING_NAMES.get(config.model_type, ())
    return architecture in ([names] if isinstance(names, str) else names) and architecture.endswith("Model")


def _entry(config: Any, name: str) -> Any:
    """Return an entry of the configuration or of its text part."""
    return getattr(config, name, None) or getattr(config.get_text_config(decoder=True), name, None)


def _of_family(config: Any, convert: str, architecture: str, family: Family) -> PoolerInfo | None:
    """Return how a model pools whose class gives vectors of its own; None for others.

    Raises:
        ConfigError: scores are wanted of it.
    """
    if architecture in family.headed and convert not in ("embed", "none"):
        return family.headed[architecture]
    if family.pools is None:
        return None
    if convert in ("classify", "reward"):
        raise ConfigError(f"{architecture} gives vectors, and no scores.", "Leave out convert.", param="convert")
    return family.pools(config)


# ---------------------------------------------------------------------- classes


def _with_head(path: Path, config: Any, convert: str, architecture: str, family: Family) -> PoolerInfo | None:
    """Return how a model with classes pools; None if it has none, or vectors are wanted."""
    if convert in ("embed", "none"):
        return None
    tokens = _entry(config, "classifier_from_token")
    classifies = architecture.endswith((_CLASSIFIES, _CLASSIFIES_TOKENS))
    if not (tokens or classifies or convert in ("classify", "reward")):
        return None
    method = "cls" if family.encodes else "last"
    if tokens:
        return _of_tokens(path, config, tokens, method)
    if convert == "reward" and not classifies:
        raise ConfigError(
            f"{architecture} has no head that gives scores.",
            "Use a checkpoint with a classification head, or convert='embed'.",
            param="convert",
        )
    count = int(getattr(config, "num_labels", 0) or 0)
    by_token = architecture.endswith(_CLASSIFIES_TOKENS) or convert == "reward"
    names = getattr(config, "id2label", None) or {}
    return PoolerInfo(
        task="token_classify" if by_token else "classify",
        method=family.pools_for_classes(config) if family.pools_for_classes is not None else method,
        activation=_activation(config, count),
        width=count,
        scores="head",
        labels=tuple(str(names.get(index, names.get(str(index), index))) for index in range(count)),
    )


def _of_tokens(path: Path, config: Any, tokens: Any, method: str) -> PoolerInfo:
    """Return how a model whose classes are tokens of its vocabulary pools.

    Raises:
        ConfigError: a token is not in the vocabulary, or what is made of their logits is not known.
    """
    if not isinstance(tokens, list | tuple) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"classifier_from_token must be a list of tokens, got {tokens!r}.", param="hf_overrides")
    ids = tuple(_token_id(path, token) for token in tokens)
    how = _entry(config, "method") or (_METHODS[0] if len(ids) == 2 else _METHODS[1])
    if how not in _METHODS:
        raise ConfigError(
            f"There is no method {how!r} for classifier_from_token.",
            f"Known: {', '.join(_METHODS)}.",
            param="hf_overrides",
        )
    difference = how == _METHODS[0]
    if difference and len(ids) != 2:
        raise ConfigError(
            f"method={how!r} needs two tokens in classifier_from_token, (false, true); there are {len(ids)}.",
            param="hf_overrides",
        )
    width = 1 if difference else len(ids)
    return PoolerInfo(
        task="classify",
        method=method,
        activation="sigmoid" if width == 1 else "softmax",
        width=width,
        scores="tokens",
        token_ids=ids,
        difference=difference,
        labels=tuple(tokens[-1:] if difference else tokens),
    )


def _token_id(path: Path, token: str) -> int:
    """Return the id of a token of the vocabulary.

    Raises:
        ConfigError: the tokenizer has none of that name.
    """
    stored = read_json(path / "tokenizer.json")
    for entry in stored.get("added_tokens") or ():
        if entry["content"] == token:
            return int(entry["id"])
    vocabulary = (stored.get("model") or {}).get("vocab") or read_json(path / "vocab.json")
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(token)
    else:
        found = next((index for index, entry in enumerate(vocabulary) if entry[0] == token), None)
    if found is None:
        raise ConfigError(
            f"classifier_from_token names {token!r}, which is no token of this vocabulary.", param="hf_overrides"
        )
    return int(found)


def _activation(config: Any, count: int) -> str:
    """Return what makes probabilities of the scores of `count` classes."""
    usual = "softmax" if count > 1 else "sigmoid"
    problem = _BY_PROBLEM.get(getattr(config, "problem_type", None) or "none")
    if problem is not None:
        return problem or usual
    stated = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    if stated is None:
        return usual
    found = _ACTIVATIONS.get(str(stated).rsplit(".", 1)[-1])
    if found is None:
        raise ModelError(
            f"config.json names the activation {stated!r}, which is not available in this version.",
            "Set override_pooler_config={'use_activation': False} and apply it to the scores yourself, after removing "
            "the entry.",
        )
    # One score has no other to be compared with.
    return usual if found == "softmax" and count == 1 else found


# ---------------------------------------------------------------------- vectors


def _with_modules(
    path: Path, config: Any, modules: Sequence[Mapping[str, Any]], architecture: str, family: Family
) -> PoolerInfo:
    """Return how a model of vectors pools, by sentence-transformers' modules if there are any."""
    text = config.get_text_config(decoder=True)
    sizes = getattr(config, "matryoshka_dimensions", None) or ()
    found = PoolerInfo(
        method="cls" if family.encodes else "last",
        activate=True,
        width=text.hidden_size,
        matryoshka=bool(sizes) or bool(getattr(config, "is_matryoshka", False)),
        matryoshka_dimensions=tuple(int(size) for size in sizes),
    )
    if not modules:
        return _of_each_token(path, config, found, ()) if architecture in family.late else found
    kinds = [str(entry.get("type", "")).rsplit(".", 1)[-1] for entry in modules]
    dense: list[DenseLayer] = []
    for kind, entry in zip(kinds, modules, strict=True):
        folder = str(entry.get("path") or "")
        if kind == "Pooling":
            found = replace(found, method=_method(path, folder))
        elif kind == "Dense":
            dense.append(_dense(path, folder))
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(
                f"{MODULES} has the module {entry.get('type')!r}, which is not available in this version.",
                "Transformer, Pooling, Dense and Normalize are.",
            )
    if kinds and kinds[-1] != "Normalize" and "Normalize" in kinds:
        raise ModelError(f"{MODULES} has a module after Normalize, which is not available in this version.")
    _mention_prompts(path)
    if architecture in family.late or (dense and "Pooling" not in kinds):
        return _of_each_token(path, config, found, dense)
    width = dense[-1].width_out if dense else found.width
    return replace(found, activate="Normalize" in kinds, dense=tuple(dense), width=width)


def _of_each_token(path: Path, config: Any, found: PoolerInfo, dense: Sequence[DenseLayer]) -> PoolerInfo:
    """Return how a model of late interaction pools: a layer makes a vector of each token's state.

    Args:
        dense: PyLate's layers; without one, the layer's weights lie among the model's, as ColBERT's own code writes it.

    Raises:
        ModelError: no file says how wide the vectors are.
    """
    marks = read_json(path / "config_sentence_transformers.json")
    before = [marks.get("query_prefix"), marks.get("document_prefix")]
    if any(before):
        logger.warning(
            "The checkpoint was trained with %r before queries and %r before documents "
            "(config_sentence_transformers.json). Here, as in vLLM, texts are used as they are: write them yourself.",
            *before,
        )
    if not dense:
        sizes = (*(_entry(config, name) for name in _WIDTHS), read_json(path / _COLBERTS).get("dim"))
        width = next((size for size in sizes if size), None) or _rows_of(path, f"{_LINEAR}.weight")
        if not isinstance(width, int) or width < 1:
            raise ModelError(
                "No file says how many numbers the vector of a token has.",
                "Set hf_overrides={'colbert_dim': ...} to the rows of linear.weight.",
            )
        dense = (DenseLayer("", found.width, width, bias=False, activation="Identity"),)
    width = dense[-1].width_out
    return replace(found, task="token_embed", late=True, activate=True, dense=tuple(dense), width=width)


def _rows_of(path: Path, weight: str) -> int | None:
    """Return how many rows a weight has by the header of model.safetensors; None if it is not there yet."""
    file = path / "model.safetensors"
    shape = shapes_of(file).get(weight, ()) if file.is_file() else ()
    return shape[0] if shape else None


def _modules(path: Path) -> Sequence[Mapping[str, Any]]:
    """Return sentence-transformers' modules, in order; none if there is no such file.

    Raises:
        ModelError: a module lies outside of the checkpoint.
    """
    found = read_json_list(path / MODULES)
    for entry in found:
        folder = Path(str(entry.get("path") or ""))
        if folder.is_absolute() or ".." in folder.parts:
            raise ModelError(f"{MODULES} names the folder {str(folder)!r}, which is outside of the checkpoint.")
    return found


def _method(path: Path, folder: str) -> str:
    """Return the method of a pooling module.

    Raises:
        ModelError: it is not available, or there are several.
    """
    file = f"{folder}/config.json"
    stated = read_json(path / folder / "config.json")
    named = stated.get("pooling_mode")
    modes = [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(named, str):
        modes = [named]
    elif isinstance(named, list | tuple):
        modes = list(named)
    known = [_MODES.get(mode) or _MODE_NAMES.get(mode) for mode in modes]
    if len(known) != 1 or known[0] is None:
        raise ModelError(
            f"{file} pools by {', '.join(modes) or 'nothing'}, which is not available in this version.",
            "One of the first token, the last token and the mean is; override_pooler_config={'pooling_type': ...} "
            "does not change the file.",
        )
    if stated.get("include_prompt") is False:
        raise ModelError(f"{file} leaves the prompt out of pooling, which is not available in this version.")
    return known[0]


def _dense(path: Path, folder: str) -> DenseLayer:
    """Return a linear layer after pooling.

    Raises:
        ModelError: its settings cannot be read.
    """
    stated = read_json(path / folder / "config.json")
    try:
        return DenseLayer(
            folder,
            int(stated["in_features"]),
            int(stated["out_features"]),
            bool(stated.get("bias", True)),
            str(stated.get("activation_function") or "torch.nn.modules.linear.Identity").rsplit(".", 1)[-1],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error!r}.", "Fetch the checkpoint again.") from error


def _sentence_settings(path: Path) -> Mapping[str, Any]:
    """Return sentence-transformers' settings of the text model, under whichever of their names there is."""
    names = ("sentence_bert_config.json", "sentence_xlnet_config.json", "sentence_roberta_config.json")
    return next((found for name in names if (found := read_json(path / name))), {})


def _mention_prompts(path: Path) -> None:
    """Say that a text needs its prompt, where sentence-transformers would write it."""
    settings = read_json(path / "config_sentence_transformers.json")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if default and prompts.get(default):
        logger.warning(
            "sentence-transformers puts %r before each text by default (config_sentence_transformers.json); here "
            "texts are used as they are: write it yourself.",
            prompts[default],
        )
    elif any(prompts.values()):
        logger.info("The checkpoint names prompts for texts: %s. Texts are used as they are.", prompts)


# ---------------------------------------------------------------------- the user's options


def _overridden(found: PoolerInfo, given: PoolerConfig) -> PoolerInfo:
    """Return it with the user's choices.

    Raises:
        ConfigError: one does not suit the model.
    """
    name = "override_pooler_config"
    changes: dict[str, Any] = {}
    if given.seq_pooling_type is not None:
        changes["method"] = given.seq_pooling_type
    if given.tok_pooling_type is not None:
        changes["token_method"] = given.tok_pooling_type
        if given.seq_pooling_type is None:
            changes["task"] = "token_classify" if found.scores else "token_embed"
    if given.activate is not None:
        changes["activate"] = given.activate
    if given.step_tag_id is not None:
        changes |= {"step_id": given.step_tag_id, "token_method": "step"}
    if given.returned_token_ids is not None:
        if not found.scores:
            raise ConfigError(f"{name}: returned_token_ids need a model with classes.", "Leave it out.", param=name)
        wrong = [number for number in given.returned_token_ids if not 0 <= number < found.width]
        if wrong:
            raise ConfigError(f"{name}: there are {found.width} classes, and no number {wrong[0]}.", param=name)
        changes["returned_ids"] = tuple(given.returned_token_ids)
    means = given.logit_mean if given.logit_mean is not None else given.logit_bias
    if means is not None or given.logit_sigma is not None:
        if not found.scores:
            raise ConfigError(f"{name}: logit_mean and logit_sigma need a model with classes.", param=name)
        changes |= {"logit_mean": float(means or 0.0), "logit_sigma": float(given.logit_sigma or 1.0)}
    if given.enable_chunked_processing:
        if found.scores or found.late:
            raise ConfigError(
                f"{name}: enable_chunked_processing is for models that give a vector of a text.",
                "Leave it out.",
                param=name,
            )
        changes["longest"] = given.max_embed_len or LONGEST
    if given.dimensions is not None:
        if found.scores or given.dimensions > found.width:
            most = "gives scores" if found.scores else f"gives vectors of {found.width} numbers"
            raise ConfigError(
                f"{name}: dimensions={given.dimensions}, but the model {most}.", "Leave it out.", param=name
            )
        if reason := found.why_not_truncated(given.dimensions):
            remedy = (
                "Give one of these."
                if found.matryoshka
                else "Leave it out, or set hf_overrides={'is_matryoshka': True} if the model was trained for that."
            )
            raise ConfigError(f"{name}: {reason}", remedy, param=name)
        changes["dimensions"] = given.dimensions
    made = replace(found, **changes)
    if made.token_method == "step" and made.step_id is None:
        raise ConfigError(f"{name}: the pooling type STEP needs step_tag_id.", param=name)
    if given.task is not None and given.task not in made.tasks:
        known = ", ".join(map(repr, made.tasks))
        raise ConfigError(f"{name}: {given.task!r} is not one of this model's tasks.", f"Known: {known}.", param=name)
    return replace(made, chosen=given.task)
