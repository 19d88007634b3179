"""Agreement: do `/tokenize` and chat completions render the same?

`/tokenize` does not take every member that shapes a chat prompt (vLLM 0.32: `reasoning_effort` and `documents` must be
folded into the template arguments; `tool_choice: "none"` hides the tools on some servers; gpt-oss is rendered by Harmony
in chat completions and by its Hugging Face template in `/tokenize`). So before tails are taken under a new set of
template arguments, small synthetic conversations with those arguments are sent to both, and the ids that the engine
says it used are compared: a question alone, and an episode with a call and its result, where Harmony and the template
differ (one writes the result as it is, the other as a JSON string). A conversation that `/tokenize` refuses cannot have
a tail, and is let pass, but for the question.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.prompt_echo import read_ids
from tokencache.engine.reply import Reply
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.renderer import REFUSALS, Renderer, RenderError, TemplateRefusedError
from tokencache.engine.upstream import AskChat
from tokencache.errors import EngineError, passing_cause

Raw = msgspec.Raw

TOOL = Raw(
    b'[{"type":"function","function":{"name":"f","description":"d",'
    b'"parameters":{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}}}]'
)
EPISODE = (
    ASK,
    (
        b'{"role":"assistant","content":null,"tool_calls":'
        b'[{"id":"call_0","type":"function","function":{"name":"f","arguments":"{\\"a\\": \\"b\\"}"}}]}'
    ),
    b'{"role":"tool","tool_call_id":"call_0","content":"\\"1\\"\\n2"}',
    b'{"role":"assistant","content":"."}',
    ASK,
)


async def echo_of_chat(ask: AskChat, body: dict[str, Any], reply: Reply | None = None) -> bytes | None:
    """Generate one token and return the packed prompt ids that the engine says it used; `None` if it does not say.

    `reply` is told what else it says.

    Raises:
        EngineError: the engine cannot be reached, or refuses.
    """
    answer = await ask({"max_tokens": 1, "temperature": 0, "return_token_ids": True, **body})
    if answer.status != 200:  # noqa: PLR2004
        raise EngineError(f"the engine answered {answer.status}: {answer.body[:300].decode(errors='replace')}", status=answer.status)
    said = Reply()
    said.add(answer.body)
    if reply is not None:
        reply.model = said.model
    return read_ids(said.prompt.raw)


async def agrees(ask: AskChat, renderer: Renderer, model: str, args: RenderArgs) -> bool | None:
    """Compare both renderings of small conversations under `args`.

    Returns:
        Whether they are the same; false also where the question alone is refused, or chat refuses what `/tokenize`
        renders. `None` if the engine gave no answer: nothing was learned.

    Raises:
        EngineError: the engine cannot be reached, or does not answer now.
    """
    try:
        if not await _alike(ask, renderer, model, args, [ASK]):
            return False
        try:
            return await _alike(ask, renderer, model, args, EPISODE)
        except TemplateRefusedError:
            return True
    except TemplateRefusedError:
        return False
    except RenderError as why:
        if (away := passing_cause(why)) is not None:
            raise away from why
        return None
    except EngineError as why:
        if why.passing:
            raise
        return False if why.status in REFUSALS else None


async def _alike(ask: AskChat, renderer: Renderer, model: str, args: RenderArgs, messages: Sequence[bytes]) -> bool:
    offered = msgspec.structs.replace(args, tools=TOOL) if args.tools is not None else args
    rendered = await renderer.render(model, messages, offered, generation=True)
    body: dict[str, Any] = {**args.members, **args.chat, "model": model, "messages": Raw(b"[" + b",".join(messages) + b"]")}
    if offered.tools is not None:
        body["tools"] = offered.tools
    return await echo_of_chat(ask, body) == rendered
