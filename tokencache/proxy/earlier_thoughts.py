"""Decides how a call is sent whose exact prompt has an earlier thought that changes how the engine treats the reply.

`engine.earlier_thoughts` explains what changes. The client must get what a direct call gets:

* A streamed reply would have its thought in the text. Whole replies do not depend on the prompt, so the engine is asked for a whole reply,
  which is sent as a stream. The exact prompt is kept.
* For a grammar or a thinking budget, only a prompt without the thought helps: the engine renders the call.
"""

from collections.abc import Sequence

from tokencache.dialects.chat.grammar import is_bound
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.sampling import budget_of
from tokencache.engine.earlier_thoughts import Part


def is_unlike(call: ChatCall, changed: Sequence[Part]) -> bool:
    """Whether the reply to an exact prompt would be unlike that to a direct call; `changed` is what earlier thoughts change."""
    grammar, budget = is_bound(call.fields), budget_of(call.fields) is not None
    return "whole" in changed or (grammar and "grammar" in changed) or (budget and "budget" in changed)


def is_asked_whole(call: ChatCall, changed: Sequence[Part]) -> bool:
    """Whether the engine is asked for a whole reply to a call that requests a stream.

    The engine refuses `prompt_logprobs` with `stream`, so such a call stays a stream.
    """
    return call.stream and "stream" in changed and bytes(call.fields.get("prompt_logprobs", b"null")) == b"null"
