"""Agreement: do `/tokenize` and chat completions render the same?

`/tokenize` does not take every member that shapes a chat prompt (vLLM 0.32: `reasoning_effort` and `documents` must be
folded into the template arguments; `tool_choice: "none"` hides the tools on some servers; Harmony models are tokenized
with another template). So before tails are taken under a new set of template arguments, a small synthetic conversation
with those arguments is sent to both, and the ids that the engine says it used are compared.
"""

from typing import Any

import msgspec

from tokencache.dialects.chat import RenderArgs
from tokencache.engines.reply import Reply
from tokencache.engines.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.render.boundary import ASK
from tokencache.render.renderer import Renderer, RenderError

Raw = msgspec.Raw

_TOOL = Raw(
    b'[{"type":"function","function":{"name":"f","description":"d",'
    b'"parameters":{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}}}]'
)


async def echo_of_chat(upstream: Upstream, body: dict[str, Any]) -> bytes | None:
    """Generate one token and return the packed prompt ids that the engine says it used; `None` if it does not say.

    Raises:
        EngineError: the engine cannot be reached, or refuses.
    """
    answer = await upstream.post("/v1/chat/completions", {"max_tokens": 1, "temperature": 0, "return_token_ids": True, **body})
    if answer.status != 200:  # noqa: PLR2004
        raise EngineError(f"the engine answered {answer.status}: {answer.body[:300].decode(errors='replace')}", status=answer.status)
    reply = Reply()
    reply.take(answer.body)
    return reply.prompt_ids()


async def agrees(upstream: Upstream, renderer: Renderer, model: str, args: RenderArgs) -> bool:
    """Compare both renderings of a small conversation under `args`; false also where one of them refuses it."""
    offered = msgspec.structs.replace(args, tools=_TOOL) if args.tools is not None else args
    body: dict[str, Any] = {**args.members, **args.chat, "model": model, "messages": Raw(b"[" + ASK + b"]")}
    if offered.tools is not None:
        body["tools"] = offered.tools
    try:
        return await echo_of_chat(upstream, body) == await renderer.render(model, [ASK], offered, generation=True)
    except (EngineError, RenderError):
        return False
