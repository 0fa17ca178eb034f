"""InternLM2: text only; a Llama whose queries, keys and values lie in one matrix. Its reward models score positions."""

from __future__ import annotations

from beheld.core.pooling import PoolerInfo
from beheld.families.family import Definition, Family, KnownCheckpoint

# One number without bounds; its card reads it at the last position.
_REWARD = PoolerInfo(
    task="token_classify", method="last", activate=False, activation="identity", width=1, scores="head", labels=("0",)
)
FAMILY = Family(
    model_types=("internlm2",),
    architectures=("InternLM2ForCausalLM", "InternLM2ForRewardModel"),
    tested=(
        KnownCheckpoint(
            "internlm2",
            "InternLM2ForCausalLM",
            "internlm/internlm2-chat-1_8b",
            note="also InternLM2ForRewardModel, for example internlm/internlm2-1_8b-reward, as a model of scores; its "
            "tokenizer needs the package sentencepiece",
        ),
    ),
    definition=Definition(config="config:InternLM2Config", model="modeling:InternLM2ForCausalLM"),
    headed={"InternLM2ForRewardModel": _REWARD},
    calls=("internlm",),
)
