"""Drives a vLLM behind a proxy that disaggregates prefill and decode: exact prompts go to `/inference/v1/generate` (`engine.generate`).

Such a proxy (llm-d's sidecar, vllm-router) sends each request to a prefill engine and then to a decode engine, and puts its own
`kv_transfer_params` in place of the request's. In a chat request that member holds the exact prompt, so the engines would render the
messages. In a request to `generate` the prompt is the member `token_ids`, which both engines use. The proxy must forward `render` and
`derender` to an engine, and the engines need `--enable-scale-out`. A call with an exact prompt takes three requests:

1. *Sampling parameters.* `render` makes those of chat from the members of the call, with a fixed question instead of its messages.
2. *Tokens.* `generate` samples after the ids of the prompt, and reports them.
3. *Message.* `derender` parses the tokens (`parsed_completion`).

A call without an exact prompt is a chat completion: its messages are rendered in any case. Replies are not streamed: `generate` streams ids
and text, but no messages. vLLM (0.32, 0.33) parses a stream of ids only by `derender`, with a request for each part, which reads all
earlier ids again: 270 ms for 3,500 of them (`engine.derender`).
"""

from functools import partial
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_members
from tokencache.dialects.json_io import TRUE
from tokencache.engine.derender import ANY_MESSAGES
from tokencache.engine.drivers.base import EngineRequest, ExactPrompt, Target
from tokencache.engine.drivers.derendered import DerenderedPrompts, ParseReply
from tokencache.engine.drivers.parsed_completion import ReplacedChat, parse_generated
from tokencache.engine.drivers.vllm import members_with_ids
from tokencache.engine.generate import GENERATE, RenderedRequest, generate_body, render_request
from tokencache.engine.upstream import EngineResponse
from tokencache.errors import EngineError

Raw = msgspec.Raw

_FALSE = Raw(b"false")


class TokenPrompts(DerenderedPrompts):
    """The driver `generate`. `parser` answers render and derender; if it is `None`, the engine does."""

    name = "generate"
    how = "token_ids of /inference/v1/generate, parsed by derender"

    async def request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        """See `Driver.request`: a request to `generate` for an exact prompt, a chat completion without one."""
        if prompt is None or call.media:
            return await super().request(call, prompt, target)
        # where a grammar begins to bind the reply depends on this member
        fields = {**whole_members(members_with_ids(call)), "include_reasoning": TRUE if call.shows_reasoning else _FALSE}
        replaced = ReplacedChat(target.upstream, call.safe_fields(), target.headers)
        try:
            rendered = await self._render(replaced._replace(fields=fields))
        except EngineError as why:
            if why.passing:
                raise
            return EngineRequest(target.path, self.write(call, None), not_exact=Reason.NOT_FOR_GENERATE)
        tokens = ids.unpack(prompt.ids)
        body = generate_body(rendered, tokens, [], rendered.limit(len(tokens), target.max_model_len))
        return EngineRequest(GENERATE, body, partial(parse_generated, self._derender, replaced))

    async def _render(self, request: ReplacedChat) -> RenderedRequest:
        """Render a request with a fixed question. Only the engine gets the harness's own headers.

        Raises:
            EngineError: the engine or the sidecar cannot be reached, or refuses.
        """
        fields: dict[str, Any] = {**request.fields, "messages": ANY_MESSAGES}
        if self._parser is not None:
            return await render_request(self._parser, fields)
        return await render_request(request.upstream, fields, request.headers)

    async def _sample(self, request: ReplacedChat, prompt: list[int]) -> tuple[EngineResponse, ParseReply]:
        rendered = await self._render(request)
        body = generate_body(rendered, prompt, [], rendered.limit(len(prompt), 0))
        return await request.upstream.post(GENERATE, body), parse_generated
