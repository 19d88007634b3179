"""Contains what drivers share that send an exact prompt to a route which samples but does not parse: `derender` makes the messages.

The probe asks whether derender reads replies as the engine's chat does: it may be a sidecar with other parsers.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.derender import Derender
from tokencache.engine.drivers.base import ParsedCompletion
from tokencache.engine.drivers.parsed_completion import ReplacedChat, parse_completion
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.reply import Reply
from tokencache.engine.template.agreement import EPISODE, TOOL
from tokencache.engine.template.renderer import REFUSALS, EngineRenderer, RenderError
from tokencache.engine.upstream import EngineClient, EngineResponse, Upstream
from tokencache.errors import NOT_NOW, EngineError

Raw = msgspec.Raw
ParseReply = Callable[[Derender, ReplacedChat, bytes], Awaitable[ParsedCompletion]]

_PROMPT = "prompt_token_ids"
_CHECK = Raw(b"[" + EPISODE[0] + b"]")


class DerenderedPrompts(Vllm):
    """A driver whose exact prompts do not go to chat. `parser` derenders; if it is `None`, the engine does."""

    skips_experts = False  # the routes do not know the member
    prefixes = False
    ignored_hint = ""

    def __init__(self, parser: Upstream | None = None) -> None:
        super().__init__(streams=False)
        self._parser = parser
        self._derender = Derender(parser)

    def probe_members(self, question: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.probe_members`."""
        del reply
        return {"messages": [Raw(question)], _PROMPT: prompt}

    @abstractmethod
    async def _sample(self, request: ReplacedChat, prompt: list[int]) -> tuple[EngineResponse, ParseReply]:
        """Sample after a prompt, without headers. Returns the answer, and what makes a chat completion of it (status 200).

        Raises:
            EngineError: the engine cannot be reached, or refuses.
        """

    async def ask(self, upstream: EngineClient, body: Mapping[str, Any]) -> EngineResponse:
        """See `Driver.ask`."""
        if _PROMPT not in body:
            return await super().ask(upstream, body)
        members = {name: value for name, value in body.items() if name != _PROMPT and (name != "model" or value)}
        request = ReplacedChat(upstream, _raw(members))
        answer, parse = await self._sample(request, body[_PROMPT])
        if answer.status != HTTPStatus.OK:
            return answer
        parsed = await parse(self._derender, request, answer.body)
        if parsed.error:
            return EngineResponse(HTTPStatus.SERVICE_UNAVAILABLE if parsed.temporary else HTTPStatus.BAD_GATEWAY, parsed.error.encode())
        return EngineResponse(answer.status, parsed.body)

    async def cannot_parse(self, upstream: EngineClient, renderer: EngineRenderer, model: str) -> str:
        """See `Driver.cannot_parse`. Compares derender with chat for a reply of the model, and tests it with a rendered tool call."""
        request: dict[str, Any] = {"model": model, "messages": _CHECK, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
        answer = await self.ask(upstream, request)
        chat = Reply()
        chat.add(answer.body)
        prompt = chat.prompt.packed
        if answer.status in NOT_NOW or prompt is None or 0 not in chat.choices:
            raise EngineError(f"the engine answered {answer.status}", status=answer.status)
        try:
            sampled = list(chat.choices[0].ids[:-1] if chat.choices[0].finish_reason == "stop" else chat.choices[0].ids)
            own = await self._derendered(upstream, request, ids.unpack(prompt), sampled)
            theirs, ours = (reply.choices[0].message(with_reasoning=True) for reply in (chat, own))
            if [_complete(theirs.content), _complete(theirs.reasoning)] != [_complete(ours.content), _complete(ours.reasoning)]:
                return "derender divides a reply into reasoning and text otherwise than chat: it may have other parsers"
            request |= {"tools": TOOL, "max_tokens": 1}
            if (await self.ask(upstream, request)).status in REFUSALS:
                return ""  # an engine without a parser for tool calls refuses tools
            args = RenderArgs(b"", b"", {}, {}, {}, TOOL)
            before = await renderer.render(model, EPISODE[:1], args, generation=True)
            after = await renderer.render(model, EPISODE[:2], args, generation=False)
            start = ids.common_head(before, after)
            called = await self._derendered(upstream, request, ids.unpack(ids.head(before, start)), ids.unpack(ids.tail(after, start)))
        except RenderError as why:
            return f"derender cannot be tested with a tool call: {why}"
        except EngineError as why:
            if why.passing:
                raise
            return str(why)
        calls = [(call.name, msgspec.json.decode(call.arguments)) for call in called.choices[0].message(with_reasoning=True).calls]
        return "" if calls == [("f", {"a": "b"})] else "derender does not find the tool call that the template writes"

    async def _derendered(self, upstream: EngineClient, request: Mapping[str, Any], prompt: list[int], reply: list[int]) -> Reply:
        """Parse a reply with given ids, as if the token limit had ended it.

        Raises:
            EngineError: derender cannot be reached, or refuses.
        """
        choice = {"index": 0, "text": "", "token_ids": reply, _PROMPT: prompt, "finish_reason": "length"}
        parsed = await parse_completion(self._derender, ReplacedChat(upstream, _raw(request)), msgspec.json.encode({"choices": [choice]}))
        if parsed.error:
            raise EngineError(parsed.error, reached=not parsed.temporary)
        found = Reply()
        found.add(parsed.body)
        return found


def _raw(members: Mapping[str, Any]) -> dict[str, Raw]:
    return {name: Raw(msgspec.json.encode(value)) for name, value in members.items()}


def _complete(text: str | None) -> str:
    """Return a text without an incomplete character at its end."""
    return (text or "").rstrip("\ufffd")
