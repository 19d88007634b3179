"""Prompts that are too long for the engine, answered as NeMo Gym's model server answers them.

Gym's server turns vLLM's refusal into an empty completion with the finish reason `length`: an agent ends its episode there, where an error
would end Gym's whole collection of rollouts. The proxy does the same where it takes that server's place (`--return-token-id-information`).
The completion has no token ids, no turn is recorded, and the session has the engine's words in an incident (`engine-refused`).

Source: nemo-gym 0.7.0, `responses_api_models/vllm_model/app.py` (`chat_completions`, `_create_empty_chat_completion`).
"""

import time

from tokencache.core.messages import Message
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.chat.whole import alike, whole_reply

ANSWERED = "answered with an empty completion, finish reason 'length'"
_REFUSED = 400
_WORDS = (b"context length", b"max_tokens", b"maximum model length")
"""The first two are those that Gym's server looks for; the last is vLLM's own check of ids (0.32, `v1/engine/input_processor.py`)."""


def is_overflow(status: int, refusal: bytes) -> bool:
    """Whether an engine's refusal says that the prompt leaves no room for a reply."""
    return status == _REFUSED and any(words in refusal for words in _WORDS)


def empty_reply(call: ChatCall, call_id: str) -> bytes:
    """Write the chat completion (JSON) that answers such a call."""
    choices = alike(call.n, Message("assistant"), "length")
    return whole_reply(call=call_id, created=time.time(), model=call.model, choices=choices, prompt_tokens=0, completion_tokens=0)
