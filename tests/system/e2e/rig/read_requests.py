"""Reads requests as vLLM's server does, without an engine: its own models, behind FastAPI, and its own parser of chat messages.

usage: python read_requests.py < REQUESTS > READINGS        in vLLM's environment

Each line of the input is `{"path": "/v1/chat/completions", "type": "application/json", "body": "base64"}`. Each line of the output is what
vLLM holds: all members of its model, and what it reads in the messages or the prompt. `{"refused": "why"}` if it accepts no such request.
"""

import asyncio
import base64
import json
import sys
import warnings
from types import SimpleNamespace

from fastapi import Depends, FastAPI, Request
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages
from vllm.renderers.inputs.preprocess import prompt_to_seq

NOT_COMPARED = {"messages", "input", "tools", "system", "request_id"}
TEXT_ONLY = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
"""What the parser of messages asks a model's configuration, if there is no media."""

warnings.simplefilter("ignore")
app = FastAPI()
found = {}


def members(request):
    """The members of a request, with their defaults."""
    return request.model_dump(exclude=NOT_COMPARED) | {"tools": len(getattr(request, "tools", None) or ())}


def add_route(path, model, more=lambda request, body: {}):
    async def read(request: model, raw_request: Request):
        found.update(members(request), **more(request, await raw_request.json()))

    app.post(path, dependencies=[Depends(validate_json_request)])(read)


def conversation(request, body):
    """What vLLM reads in the messages of a chat; `None` if it would look for media in them, or refuses them."""
    media = has_non_text_content(body["messages"])
    try:
        parsed = None if media else parse_chat_messages(list(request.messages), TEXT_ONLY, "string")[0]
    except (ValueError, TypeError, KeyError, AttributeError) as why:
        return {"media": media, "unparsed": f"{type(why).__name__}: {why}"}
    return {"media": media, "conversation": parsed}


def prompts(request, _body):
    """How many prompts a text completion has, as vLLM's `preprocess_completion` counts them."""
    return {"prompts": len(prompt_to_seq(request.prompt)) if request.prompt is not None else 0}


add_route("/v1/chat/completions", ChatCompletionRequest, conversation)
add_route("/v1/completions", CompletionRequest, prompts)
add_route("/v1/responses", ResponsesRequest)
add_route("/v1/messages", AnthropicMessagesRequest)
add_route("/tokenize", TokenizeRequest, lambda request, _body: {"kind": type(request).__name__})


async def reading(path, kind, body):
    """Send one request to the application, and return what it found."""
    found.clear()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "server": ("engine", 80), "client": ("client", 1),
        "headers": [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))],
    }  # fmt: skip
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(event):
        sent.append(event)

    try:
        await app(scope, receive, send)
    except Exception as why:  # noqa: BLE001 - vLLM answers with its error handlers, and accepts nothing then
        return {"refused": f"{type(why).__name__}: {str(why)[:300]}"}
    status = sent[0]["status"]
    return dict(found) if status == 200 else {"refused": f"{status}: {sent[1]['body'][:300].decode()}"}


async def main():
    output = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        one = json.loads(line)
        read = await reading(one["path"], one["type"], base64.b64decode(one["body"]))
        output.write(json.dumps(read, default=repr) + "\n")


asyncio.run(main())
