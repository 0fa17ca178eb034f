"""Finds a transformers model's decoder layers and its towers' blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from beheld.core.errors import ModelError

# Fewer equal layers than this are not worth compiling.
_STACK = 4


def tower_blocks(model: nn.Module, text: nn.Module) -> list[nn.ModuleList]:
    """Return the stacks of equal layers outside the text model: the towers' blocks."""
    inside = set(text.modules())
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and m not in inside]
    return [stack for stack in stacks if len(stack) >= _STACK and len({type(layer) for layer in stack}) == 1]


def layers_of(part: nn.Module) -> list[nn.Module]:
    """Return the layers of a model and its towers: what stands in a list or a sequence that is part of no other one."""
    if isinstance(part, nn.ModuleList | nn.Sequential):
        # A list within a list is nothing that is called.
        return [layer for each in part for layer in (layers_of(each) if isinstance(each, nn.ModuleList) else [each])]
    return [layer for child in part.children() for layer in layers_of(child)]


def speaker_and_cores(model: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the module whose forward ends with the head, and its parts that compute hidden states, one in the other.

    The first part is the speaker's own, the last one has the layers; which of them its forward calls is its affair.

        LlavaForConditionalGeneration     lm_head, model: LlavaModel, in it LlamaModel
        Blip2ForConditionalGeneration     language_model: OPTForCausalLM
            OPTForCausalLM (the speaker)  lm_head, model: OPTModel, in it OPTDecoder, which its forward calls

    Raises:
        ModelError: the model has no head after its layers.
    """
    head, text = model.get_output_embeddings(), text_model(model)
    speaker = model
    while True:
        core = next((part for part in speaker.children() if _holds(part, text)), None)
        if core is None or head is None:
            raise ModelError(f"{type(model).__name__} has no head after its layers.")
        if not _holds(core, head):
            # A module is listed before its parts.
            return speaker, tuple(part for part in core.modules() if _holds(part, text))
        speaker = core


def core_of(model: Any) -> Any:
    """Return the part of a model that computes hidden states from embeddings, whatever head it has, or none."""
    if model.get_output_embeddings() is None:
        return model.base_model
    return speaker_and_cores(model)[1][0]


def _holds(part: nn.Module, searched: nn.Module) -> bool:
    return any(module is searched for module in part.modules())


def text_part(model: Any) -> Any:
    """Return the part of a transformers model that holds the decoder layers, whatever their list's name is."""
    decoder, outer = model, None
    # A language model nested in another one has its own decoder.
    while not hasattr(decoder, "layers") and hasattr(decoder, "get_decoder") and decoder is not outer:
        decoder, outer = decoder.get_decoder(), decoder
    if not hasattr(decoder, "layers"):
        # Llama 4's language model is its own decoder, around the one with the layers.
        decoder = getattr(decoder, "model", decoder)
    if not hasattr(decoder, "layers"):
        # Some name encoder and decoder together this way.
        decoder = getattr(decoder, "decoder", decoder)
    if not hasattr(decoder, "layers"):
        # Some call their head the decoder.
        decoder = getattr(model, "base_model", decoder)
    return decoder


def text_model(model: Any) -> Any:
    """Return the part of a transformers model that holds the decoder layers, as its list `layers`.

    Raises:
        ModelError: it has no such part.
    """
    decoder = text_part(model)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} cannot be run yet: its {type(decoder).__name__} has no list `layers` of decoder "
            "layers, as most text models of transformers have."
        )
    return decoder
