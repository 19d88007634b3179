"""Sends calls that hide their reasoning, and whose reply a grammar binds, to `/inference/v1/generate` (`engine.generate`).

vLLM (0.26 to 0.32) starts a grammar at the first token if a chat request has `include_reasoning: false`, and otherwise after the thought.
With that member, it returns no ids. `generate` returns them, and is told where the grammar starts: `render` says so, like the sampling
parameters. The routes need `--enable-scale-out`. Without them, chat is asked with the reasoning, and the turn is marked (`late-grammar`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.grammar import may_be_bound
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.derender import ANY_MESSAGES, Derender
from tokencache.engine.drivers.base import EngineRequest, ExactPrompt, Target
from tokencache.engine.drivers.parsed_completion import ReplacedChat, parse_generated
from tokencache.engine.generate import GENERATE, generate_body, render_request

Raw = msgspec.Raw

_FALSE = Raw(b"false")


class BoundReplies:
    """Makes requests to `generate`; `derender` makes the messages."""

    def __init__(self, derender: Derender) -> None:
        self._derender = derender

    @staticmethod
    def takes(call: ChatCall) -> bool:
        """Whether a grammar may bind the reply to a direct call from its first token: the call hides its reasoning."""
        return not (call.media or call.shows_reasoning) and may_be_bound(call.fields)

    async def request(self, call: ChatCall, fields: Mapping[str, Raw], prompt: ExactPrompt | None, target: Target) -> EngineRequest | None:
        """Make the request; `None` if no grammar binds the reply, so that chat samples the same.

        Args:
            call: the call.
            fields: the members of its request to the engine, without those of streams.
            prompt: its exact prompt; with `None` the engine renders.
            target: the engine.

        Raises:
            EngineError: the engine does not have the routes, refuses, or cannot be reached.
        """
        asked: dict[str, Any] = {**fields, "include_reasoning": _FALSE, **({} if prompt is None else {"messages": ANY_MESSAGES})}
        rendered = await render_request(target.upstream, asked, target.headers)
        if not rendered.sampling.get("structured_outputs"):
            return None
        tokens = rendered.ids if prompt is None else ids.unpack(prompt.ids)
        body = generate_body(rendered, tokens, [], rendered.limit(len(tokens), target.max_model_len))
        replaced = ReplacedChat(target.upstream, call.safe_fields(), target.headers)
        return EngineRequest(GENERATE, body, partial(parse_generated, self._derender, replaced))
