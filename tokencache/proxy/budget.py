"""The end of an episode whose budget is used up: a last reply that no engine said.

An agent ends its loop when the model stops without a call, so that is what it is told, in its dialect and in the form it asked for. An
error would do worse: harnesses repeat those, or fail. No turn is recorded of it: the model did not say it.
"""

import time

from tokencache.core.messages import Message
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.chat.whole import alike, whole_reply
from tokencache.dialects.completions import whole_text

SPENT = "budget-spent"
LAST_WORDS = "The budget of this session is used up."


def last_reply(call: ChatCall, call_id: str) -> bytes:
    """Write the reply that ends the episode, as the engine would have written a whole one; each choice that was asked for says the same."""
    choices = alike(call.n, Message("assistant", LAST_WORDS), "stop")
    write = whole_text if call.dialect == "completions" else whole_reply
    return write(call=call_id, created=time.time(), model=call.model, choices=choices, prompt_tokens=0, completion_tokens=0)
