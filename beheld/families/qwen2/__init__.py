"""Qwen2: text only.

Qwen2.5-Math's reward models score each position, and those of its process only the ends of steps, with two classes.
"""

from __future__ import annotations

from beheld.core.pooling import PoolerInfo
from beheld.families.family import Family, GGUFLayout, KnownCheckpoint

# `<extra_0>`, which its card writes after each step.
_STEP = 151651
_REWARD = PoolerInfo(
    task="token_classify", method="last", activate=False, activation="identity", width=1, scores="head", labels=("0",)
)
_PROCESS = PoolerInfo(
    task="token_classify", method="last", token_method="step", step_id=_STEP, width=2, scores="head", labels=("0", "1")
)
FAMILY = Family(
    model_types=("qwen2",),
    tested=(
        KnownCheckpoint(
            "qwen2",
            "Qwen2ForCausalLM",
            "Qwen/Qwen2-0.5B-Instruct",
        ),
    ),
    gguf=GGUFLayout("qwen2", "Qwen2ForCausalLM", ("qwen2vl",)),
    headed={"Qwen2ForRewardModel": _REWARD, "Qwen2ForProcessRewardModel": _PROCESS},
    calls=("hermes",),
    reasoning=("think",),
)
