"""Lists the reasons with which an engine ends a reply.

An unknown reason is recorded as the engine wrote it. To add a reason, add a member to `FinishReason`, and what each dialect writes for it;
`tests/test_guards.py` finds a dialect or a format that lacks it.
"""

from typing import Literal

from tokencache.core.reasons import Described

Ending = Literal["stop", "length", "abort"]
"""How a reply ended, for a trainer: the model ended it, a limit cut it, or it was broken off."""


class FinishReason(Described):
    """A finish reason of a chat completion: those of vLLM (0.33, `v1/engine/__init__.py` and its chat route) and of OpenAI's API."""

    STOP = "stop", "the model ended it, or a stop string or stop id of the request"
    TOOL_CALLS = "tool_calls", "the model ended it, and its parser found calls"
    FUNCTION_CALL = "function_call", "the same, in OpenAI's older API"
    LENGTH = "length", "a limit of tokens cut it"
    REPETITION = "repetition", "vLLM ended it because it repeated itself"
    CONTENT_FILTER = "content_filter", "a filter ended it"
    ABORT = "abort", "the engine broke it off"
    ERROR = "error", "the engine failed during it"


_ENDINGS: dict[str, Ending | None] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "stop",
    FinishReason.FUNCTION_CALL: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: None,
    FinishReason.CONTENT_FILTER: None,
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "abort",
}


def ending(reason: str | None, *, stopped: bool) -> Ending:
    """Return how a reply with this finish reason ended.

    Trainers that mask or penalize everything but `stop` (SkyRL's `apply_overlong_filtering`) mean the engine's reason. A chat completion
    reports `tool_calls` where the engine stopped normally.

    Args:
        reason: the recorded finish reason: `length` wherever the ids prove that the reply was cut (`proxy.recorder`); `None` if it was
            broken off.
        stopped: whether its last id is one at which the model ends a reply. That decides for reasons that say nothing about it.
    """
    if reason is None:
        return "abort"
    return _ENDINGS.get(reason) or ("stop" if stopped else "length")
