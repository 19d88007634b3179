"""Decides how a call is sent whose exact prompt has an earlier thought that changes how the engine treats the reply.

`engine.earlier_thoughts` explains what changes. The client must get what a direct call gets:

* A streamed reply would have its thought in the text. Whole replies do not depend on the prompt, so the engine is asked for a whole reply,
  which is sent as a stream. The exact prompt is kept.
* For a grammar or a thinking budget, only a prompt without the thought helps: the engine renders the call.

The prompt of a direct call may have an earlier thought as well: a client sends thoughts back, and the template shows them; or the template
writes the marks of a thought by itself. So the exact prompt is compared with the engine's rendering.
"""

from collections.abc import Sequence

import msgspec

from tokencache.core.reasons import Reason
from tokencache.dialects.chat.grammar import is_bound
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.sampling import budget_of
from tokencache.engine.earlier_thoughts import EarlierThoughts, Part
from tokencache.engine.model import Model
from tokencache.engine.template.renderer import RenderError
from tokencache.errors import passing_cause
from tokencache.proxy.plan import Plan


def is_unlike(call: ChatCall, changed: Sequence[Part]) -> bool:
    """Whether the reply to an exact prompt would be unlike that to a direct call; `changed` is what earlier thoughts change."""
    grammar, budget = is_bound(call.fields), budget_of(call.fields) is not None
    return "whole" in changed or (grammar and "grammar" in changed) or (budget and "budget" in changed)


def is_asked_whole(call: ChatCall, changed: Sequence[Part]) -> bool:
    """Whether the engine is asked for a whole reply to a call that requests a stream.

    The engine refuses `prompt_logprobs` with `stream`, so such a call stays a stream.
    """
    return call.stream and "stream" in changed and bytes(call.fields.get("prompt_logprobs", b"null")) == b"null"


async def as_directly(plan: Plan, changed: Sequence[Part], call: ChatCall, model: Model, thoughts: EarlierThoughts) -> Plan:
    """Return the plan with which a call gets the reply that a direct call gets.

    Args:
        plan: a plan with an exact prompt that has an earlier thought.
        changed: what that thought changes.
        call: the call.
        model: the model.
        thoughts: what earlier thoughts change for the call.

    Raises:
        EngineError: the engine cannot answer now.
    """
    if not (is_unlike(call, changed) or is_asked_whole(call, changed)):
        return plan
    args, generation = call.as_written()
    try:
        rendered = await model.renderer.render(call.model, call.safe_messages(), args, generation=generation)
    except RenderError as why:
        if (temporary := passing_cause(why)) is not None:
            raise temporary from why
    else:
        start = max(0, len(rendered) - len(plan.parts[1]))
        directly = thoughts.changed(rendered[:start], rendered[start:])
        changed = tuple(part for part in changed if part not in directly)
    if is_unlike(call, changed):
        return Plan(match="plain", reason=Reason.EARLIER_THOUGHT)
    return msgspec.structs.replace(plan, changed=tuple(changed))
