"""Writes replies without an engine: when the budget of a session is used up, and when a prompt is too long.

No turn is recorded for them, because the model did not generate them.

An agent ends its loop when the model stops without a tool call. So a call above the budget gets a text reply, in the client's dialect
and form. An error would be worse, because harnesses retry after errors, or fail.

NeMo Gym's model server answers a prompt that is too long with an empty completion and the finish reason `length`. Then the agent ends its
episode; an error would end Gym's whole collection of rollouts. The proxy does the same where it replaces that server
(`--return-token-id-information`). An incident (`engine-refused`) keeps the engine's message.
Source: nemo-gym 0.7.0, `responses_api_models/vllm_model/app.py` (`chat_completions`, `_create_empty_chat_completion`).
"""

import time

from tokencache.core.messages import Message
from tokencache.dialects.base import Dialect
from tokencache.dialects.chat.reply import WrittenReply, repeated_choice
from tokencache.dialects.chat.request import ChatCall

LAST_WORDS = "The budget of this session is used up."
OVERFLOW_DETAIL = "answered with an empty completion, finish reason 'length'"


def budget_reply(dialect: Dialect, call: ChatCall, call_id: str) -> bytes:
    """Write the completion (JSON) that ends an episode; all its choices are the same."""
    choices = repeated_choice(call.n, Message("assistant", LAST_WORDS), "stop")
    return dialect.completion(WrittenReply(call_id, time.time(), call.model, choices))


def overflow_reply(dialect: Dialect, call: ChatCall, call_id: str) -> bytes:
    """Write the completion (JSON) for a prompt that is too long (`Driver.is_overflow`)."""
    choices = repeated_choice(call.n, Message("assistant"), "length")
    return dialect.completion(WrittenReply(call_id, time.time(), call.model, choices))
