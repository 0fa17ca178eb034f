"""The classes of messages that may cross the boundary of the engine's process."""

from __future__ import annotations

from collections.abc import Iterable

from beheld.core import (
    config,
    grounding,
    media,
    outputs,
    plan,
    pooling_params,
    repetition,
    request,
    sampling,
    sleep,
    structured_outputs,
)
from beheld.engine import columns, messages, stats
from beheld.engine.routing import RoutingStats
from beheld.scheduler.step_builder import SchedulerStats
from beheld.wire.codec import Codec

_CLASSES: tuple[type, ...] = (
    *config.MODEL_CLASSES,
    *(config.EngineConfig, config.Capacity, config.MediaWork),
    *(media.MediaItem, media.MediaSpan, media.MediaReceipt),
    *(outputs.TokenEvent, plan.TokenLogprobs, plan.PromptLogprobs),
    *(sampling.Sampling, structured_outputs.Grammar, structured_outputs.ReasoningFormat),
    *(
        pooling_params.Pooling,
        sampling.LogprobsMode,
        sampling.TimestampRule,
        pooling_params.Alignment,
        sampling.ThinkingBudget,
        sampling.PromptIds,
    ),
    *(repetition.RepetitionDetectionParams, repetition.NoRepeatWindow),
    *(request.Request, request.LoRARequest, request.FinishReason),
    *(grounding.AnswerGrounding, grounding.GroundedImage),
    *(messages.Submit, messages.Abort, messages.Stop, messages.Ping, messages.ClearCache, messages.Close),
    *(
        messages.Tokenizer,
        messages.Events,
        messages.Pong,
        messages.Died,
        messages.Unread,
        messages.Decisions,
        messages.Ready,
        messages.Failed,
    ),
    *(messages.AddLoRA, messages.LoRAAdded, messages.ManageLoRA, messages.LoRAAction, messages.LoRAsManaged),
    *(
        messages.Sleep,
        messages.WakeUp,
        messages.Asleep,
        messages.Profile,
        messages.Profiled,
        messages.CheckWeights,
        messages.WeightsChecked,
        sleep.EnginePart,
        sleep.PauseMode,
    ),
    *(messages.TryItems, messages.Tried, columns.EventColumns),
    *(stats.EngineStats, stats.EngineReport, stats.EngineState, RoutingStats, SchedulerStats),
    messages.WakingUp,
)


def codec_with(classes: Iterable[type] = ()) -> Codec:
    """A codec of all messages to an engine, and of these classes."""
    return Codec((*_CLASSES, *classes))


CODEC = codec_with()
