"""Agents whose calls the official SDKs make, with retries of their own (twice, by default): openai for chat and Responses, anthropic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import openai

from tests.system.faults.harness import HEADER, Agent

if TYPE_CHECKING:
    from tests.system.faults.dialects import ReceivedReply

_ONE_CALL_EACH = httpx2.Limits(max_keepalive_connections=0)
"""Connections are not kept, so each attempt has one of its own."""


@dataclass
class SdkAgent(Agent):
    """As `Agent`. What its SDK gives up it asks again, as a new call of the SDK."""

    async def _ask(self, replica: str, history: list[dict[str, Any]], attempt: int) -> ReceivedReply | str:
        body = self.dialect.body(history, stream=self.streams) | {"extra_headers": {HEADER: self.session}}
        try:
            if self.dialect.name == "messages":
                http = anthropic.DefaultAsyncHttpxClient(limits=_ONE_CALL_EACH)
                async with anthropic.AsyncAnthropic(base_url=replica, api_key="none", http_client=http, timeout=self.timeout_s) as claude:
                    return await self._received(await claude.messages.create(**body))
            one_call_each = openai.DefaultAsyncHttpxClient(limits=_ONE_CALL_EACH)
            async with openai.AsyncOpenAI(
                base_url=f"{replica}/v1", api_key="none", http_client=one_call_each, timeout=self.timeout_s
            ) as client:
                made = client.chat.completions if self.dialect.name == "chat" else client.responses
                return await self._received(await made.create(**body))
        except (openai.OpenAIError, anthropic.AnthropicError, httpx2.HTTPError) as why:
            return type(why).__name__

    async def _received(self, answer: Any) -> ReceivedReply | str:
        if not self.streams:
            return self.dialect.whole(answer.to_dict()) or "half"
        events = [event.to_json(indent=None) async for event in answer]
        return self.dialect.streamed(events + ["[DONE]"] * (self.dialect.name == "chat")) or "half"
