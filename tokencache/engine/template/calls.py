"""Finds the text with which a template ends every call of a reply.

If a stream was cut after a complete call, the reply ends where that call does. The template shows what the model samples there: the
*closing*, which follows the arguments of the last call of a reply (`boundary`). Its last word, without the brackets of JSON, ends every
call if it occurs once more with a further call (`</tool_call>`). Some templates write something after all calls (Mistral's `]`, the end of
calls of DeepSeek-V3); then a reply that ends after an earlier call is none that the template writes.
"""

from contextlib import suppress

import msgspec

from tokencache.core.messages import ToolCall
from tokencache.engine.template.boundary import ASK, SENTINEL, BoundaryUnknownError, SentinelPlace, stand_in
from tokencache.engine.template.learned import LearnedTemplate
from tokencache.engine.template.renderer import TemplateRefusedError
from tokencache.engine.template.shapes import TailRequest

_BRACKETS = "\"}]'"
_OTHER_CALL = ToolCall("call00000", "f", "{}")


async def call_end(template: LearnedTemplate, request: TailRequest) -> str:
    """Return the text that ends every call of the reply before a tail; `""` if the template does not show one.

    Raises:
        RenderError: the engine cannot answer now.
    """
    with suppress(BoundaryUnknownError, TemplateRefusedError):
        boundary = await template.boundary(request)
        if boundary.place is not SentinelPlace.LAST_CALL:
            return ""
        words = (await template.renderer.read(request.model, boundary.closing)).split() if boundary.closing else []
        end = words[-1].lstrip(_BRACKETS) if words else ""
        more = msgspec.structs.replace(request.reply, calls=(*request.reply.calls, _OTHER_CALL))
        texts = []
        for reply in (request.reply, more):
            rendered = await template.render("small", request, [ASK, stand_in(reply, SENTINEL, boundary.place)], generation=False)
            texts.append(await template.renderer.read(request.model, rendered))
        return end if end and texts[1].count(end) == texts[0].count(end) + 1 else ""
    return ""
