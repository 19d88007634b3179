"""Joins the parts of a reply that a client continued.

A client may send the beginning of a reply as the last message, and ask the engine to continue it (`continue_final_message`, or a last entry
of the assistant's in Messages). It keeps both parts as one message. So the turn of such a call answers the messages before the beginning,
and its message is the whole: the beginning as the client has it, and the text that was served. If the beginning is a recorded reply, the
prompt of the call ends with the ids of that reply, and the turn continues that turn.
"""

import msgspec

from tokencache.core.messages import Message


def whole_reply(begun: Message, served: Message) -> Message:
    """Return a reply as its client keeps it.

    An engine's parser may call the continued text reasoning, because the end of the reasoning is in the prompt (vLLM 0.32, whole replies).
    Its client has asked for the rest of a text, and appends it.

    Args:
        begun: the message with the beginning, and the reasoning before it.
        served: what was served after it.
    """
    return msgspec.structs.replace(begun, content=(begun.content or "") + rest_of(served), calls=served.calls)


def rest_of(served: Message) -> str:
    """Return the text that was served as the rest of a reply."""
    return served.content or served.reasoning or ""
