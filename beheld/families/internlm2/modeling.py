"""InternLM2's model: transformers' Llama, which reads the publisher's names of weights."""

from __future__ import annotations

from transformers import LlamaForCausalLM

from beheld.families._shared.intern.modeling import reads_internlm2
from beheld.families.internlm2.config import InternLM2Config


@reads_internlm2
class InternLM2ForCausalLM(LlamaForCausalLM):
    """transformers' Llama that reads InternLM2's layout."""

    config_class = InternLM2Config
