"""The official OpenAI client: chat completions and Responses."""

import json

import openai

from rig.harness import TOOLS
from rig.sdk import LIMIT, SYSTEM, Client, Reply, png_uri, rewritten
from rig.server import MODEL


class Chat(Client):
    name = "chat"

    def connect(self, url):
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def request(self, history):
        messages = [{"role": "system", "content": SYSTEM}]
        for kind, entry in history:
            if kind == "user":
                messages.append({"role": "user", "content": _chat_content(entry)})
            elif kind == "results":
                messages += [{"role": "tool", "tool_call_id": call, "content": _chat_content(text)} for call, _, text in entry]
            else:
                messages.append(self.native(entry) or self.message(entry))
        return {"model": MODEL, "max_tokens": LIMIT, "messages": messages, "tools": TOOLS}

    def message(self, reply):
        thought, text = self.thought_and_text(reply)
        message = {"role": "assistant", "content": text} | ({"reasoning": thought} if thought else {})
        if reply.calls:
            written = [(call, {"name": name, "arguments": json.dumps(rewritten(given))}) for call, name, given in reply.calls]
            message["tool_calls"] = [{"id": call, "type": "function", "function": function} for call, function in written]
        return message

    async def send(self, asked, *, stream):
        if stream:
            async with self.sdk.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
        else:
            answer = await self.sdk.chat.completions.create(**asked)
        choice = answer.choices[0]
        message = choice.message
        calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        native = {
            "role": "assistant",
            "content": message.content,
            **({"tool_calls": [call.to_dict() for call in message.tool_calls]} if calls else {}),
        }
        thought, text = message.model_extra.get("reasoning") or "", message.content or ""
        return Reply(self.name, native, thought, text, calls, choice.finish_reason, answer.usage.prompt_tokens)


class Responses(Client):
    name = "responses"

    def connect(self, url):
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def request(self, history):
        items = []
        for kind, entry in history:
            if kind == "user":
                items.append({"role": "user", "content": _responses_content(entry)})
            elif kind == "results":
                items += [{"type": "function_call_output", "call_id": call, "output": _responses_content(text)} for call, _, text in entry]
            else:
                items += self.native(entry) or self.items(entry)
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        return {"model": MODEL, "instructions": SYSTEM, "input": items, "tools": tools}

    def items(self, reply):
        thought, text = self.thought_and_text(reply)
        of_thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
        items = [of_thought] if thought else []
        items += [{"role": "assistant", "content": text}] if text else []
        for call, name, given in reply.calls:
            items.append({"type": "function_call", "call_id": call, "name": name, "arguments": json.dumps(rewritten(given))})
        return items

    async def send(self, asked, *, stream):
        if stream:
            async with self.sdk.responses.stream(**asked) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await self.sdk.responses.create(**asked)
        return self.read(answer)

    def read(self, answer):
        of = {kind: [item for item in answer.output if item.type == kind] for kind in ("reasoning", "message", "function_call")}
        return Reply(
            self.name,
            [item.model_dump(exclude_unset=True) for item in answer.output],
            "".join(part.text for item in of["reasoning"] for part in item.content),
            "".join(part.text for item in of["message"] for part in item.content),
            [(item.call_id, item.name, json.loads(item.arguments)) for item in of["function_call"]],
            answer.status,
            answer.usage.input_tokens,
        )

    async def count(self, history):
        return (await self.sdk.responses.input_tokens.count(**self.request(history))).input_tokens


def _chat_content(said):
    if isinstance(said, str):
        return said
    return [{"type": "text", "text": said.text}, *({"type": "image_url", "image_url": {"url": png_uri(image)}} for image in said.images)]


def _responses_content(said):
    if isinstance(said, str):
        return said
    return [{"type": "input_text", "text": said.text}, *({"type": "input_image", "image_url": png_uri(image)} for image in said.images)]
