"""The official Anthropic client."""

import base64

import anthropic

from rig.harness import TOOLS
from rig.sdk import LIMIT, SYSTEM, Client, Reply, rewritten
from rig.server import MODEL


class Messages(Client):
    name = "messages"

    def connect(self, url):
        return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)

    def request(self, history):
        messages = []
        for kind, entry in history:
            if kind == "user":
                messages.append({"role": "user", "content": _content(entry)})
            elif kind == "results":
                results = [{"type": "tool_result", "tool_use_id": call, "content": _content(text)} for call, _, text in entry]
                messages.append({"role": "user", "content": results})
            else:
                messages.append({"role": "assistant", "content": self.native(entry) or self.blocks(entry)})
        tools = [{"input_schema": tool["function"]["parameters"]} | tool["function"] for tool in TOOLS]
        tools = [{name: value for name, value in tool.items() if name != "parameters"} for tool in tools]
        return {"model": MODEL, "system": SYSTEM, "messages": messages, "tools": tools}

    def blocks(self, reply):
        thought, text = self.thought_and_text(reply)
        blocks = [{"type": "thinking", "thinking": thought, "signature": "of-another"}] if thought else []
        blocks += [{"type": "text", "text": text}] if text else []
        return blocks + [{"type": "tool_use", "id": call, "name": name, "input": rewritten(given)} for call, name, given in reply.calls]

    async def send(self, asked, *, stream):
        if stream:
            async with self.sdk.messages.stream(**asked, max_tokens=LIMIT) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.sdk.messages.create(**asked, max_tokens=LIMIT)
        of = {kind: [block for block in answer.content if block.type == kind] for kind in ("thinking", "text", "tool_use")}
        return Reply(
            self.name,
            answer.content,
            "".join(block.thinking for block in of["thinking"]),
            "".join(block.text for block in of["text"]),
            [(block.id, block.name, block.input) for block in of["tool_use"]],
            answer.stop_reason,
            answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0),
        )

    async def count(self, history):
        return (await self.sdk.messages.count_tokens(**self.request(history))).input_tokens


def _content(said):
    if isinstance(said, str):
        return said
    sources = [{"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()} for image in said.images]
    return [{"type": "text", "text": said.text}, *({"type": "image", "source": source} for source in sources)]
