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


def speaker_and_core(model: Any) -> tuple[Any, Any]:
    """Return the module whose forward ends with the head, and its part that computes hidden states.

        LlavaForConditionalGeneration     lm_head, model: LlavaModel           -> itself, LlavaModel
        Llama4ForConditionalGeneration    language_model: Llama4ForCausalLM
            Llama4ForCausalLM             lm_head, model: Llama4TextModel      -> Llama4ForCausalLM, Llama4TextModel

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
            return speaker, core
        speaker = core


def _holds(part: nn.Module, searched: nn.Module) -> bool:
    return any(module is searched for module in part.modules())


def text_model(model: Any) -> Any:
    """Return the part of a transformers model that holds the decoder layers."""
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
    layers = getattr(decoder, "layers", None)
    assert isinstance(layers, nn.ModuleList), f"{type(decoder).__name__} keeps its layers elsewhere"
    return decoder
