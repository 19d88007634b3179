"""The common method of other projects: render the whole history with the chat template and tokenize all of it, every turn.

The published method of token capture before the engine, without its checks: miles' session server (`miles/rollout/session`), slime's agent
adapters (`slime/agent/trajectory.py`), and NeMo Gym's capture. Ids and log probabilities of the reply are kept in memory.
"""

import os
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from tokenizers import Tokenizer

from bench.relay import Relay, serve
from tokencache.testing import build_tokenizer
from tokencache.testing.template import render

_CHOICE = msgspec.defstruct("_CHOICE", [("token_ids", list[int]), ("logprobs", msgspec.Raw)])
_REPLY = msgspec.json.Decoder(msgspec.defstruct("_REPLY", [("choices", list[_CHOICE])]))


def tokenizer() -> tuple[Tokenizer, str]:
    """The tokenizer and the source of its template."""
    folder = os.environ.get("BENCH_TOKENIZER")
    if folder:
        return Tokenizer.from_file(str(Path(folder, "tokenizer.json"))), Path(folder, "chat_template.jinja").read_text()
    built = build_tokenizer()
    return built.backend, built.chat_template


class Capture(Relay):
    """Turns of sessions, as ids; the session is only a key here."""

    def __init__(self, upstream: str, engine: aiohttp.ClientSession) -> None:
        super().__init__(upstream, engine)
        self.backend, self.template = tokenizer()
        self.turns: list[tuple[list[int], list[int], bytes]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return await super().handle(request)
        asked: dict[str, Any] = msgspec.json.decode(await request.read())
        text = render(self.template, asked["messages"], asked.get("tools"))
        prompt = self.backend.encode(text, add_special_tokens=False).ids
        streamed, _ = asked.pop("stream", False), asked.pop("stream_options", None)
        asked |= {"return_token_ids": True, "logprobs": True, "kv_transfer_params": {"prompt_token_ids": prompt}}
        async with self.engine.post(self.upstream + request.path_qs, data=msgspec.json.encode(asked)) as answer:
            body = await answer.read()
        choice = _REPLY.decode(body).choices[0]
        self.turns.append((prompt, choice.token_ids, bytes(choice.logprobs)))
        if len(self.turns) > 1000:
            self.turns.clear()
        if not streamed:
            return web.Response(body=body, content_type="application/json")
        # A stream in one chunk, as miles' server makes it.
        body = body.replace(b'"message":', b'"delta":', 1)
        return web.Response(body=b"data: " + body + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")


def connect() -> aiohttp.ClientSession:
    # vLLM closes idle connections after 5 s. While this loop tokenizes, it does not see that, and would use a closed one.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), headers={"Content-Type": "application/json"})


if __name__ == "__main__":
    serve(Capture, connect)
