"""A simulated harness that behaves like real ones: it keeps its own history and sends back a changed form of the model's reply.

It drops reasoning, trims text, rewrites a call's arguments with other spacing and order, and answers the calls. It calls a proxy
(`session=…`) or an engine directly (`session=None`). In both cases it requests token ids and log probabilities, so that tests compare the
proxy's records with the engine's own values and not with data that the proxy stored.
"""

import json
from dataclasses import dataclass, field

from rig.server import MODEL

SESSION_HEADER = "X-Tokencache-Session"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
            },
        },
    },
    {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass
class Reply:
    """One choice of an answer, in the same form whether it was streamed or not."""

    status: int
    raw: bytes
    prompt: list = field(default_factory=list)
    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    message: dict = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def prefix(self):
        return self.prompt + self.ids

    @property
    def calls(self):
        return self.message.get("tool_calls") or []

    @property
    def text(self):
        return self.message.get("content") or ""

    def extends(self, other):
        return self.prompt[: len(other.prefix)] == other.prefix


def read_body(status, raw):
    """The choices of a whole answer."""
    body = json.loads(raw)
    if status != 200:
        return [Reply(status, raw)]
    replies = []
    for choice in body["choices"]:
        logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]
        reply = Reply(status, raw, body.get("prompt_token_ids") or [], choice.get("token_ids") or [], logprobs, choice["message"])
        reply.finish_reason, reply.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        replies.append(reply)
    return replies


def read_stream(status, raw):
    """The choices of a streamed answer; an error event among them is an assertion error."""
    events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", raw[-200:]
    found = {}
    for event in events[:-1]:
        chunk = json.loads(event)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            reply = found.setdefault(choice["index"], Reply(status, raw))
            reply.prompt = reply.prompt or chunk.get("prompt_token_ids") or []
            reply.ids += choice.get("token_ids") or []
            reply.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            reply.stop_reason = choice.get("stop_reason") or reply.stop_reason
            _add(reply.message, choice["delta"])
    return [found[index] for index in sorted(found)]


def _add(message, delta):
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= piece["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[piece["index"]]
        call["id"] = piece.get("id") or call["id"]
        for name, text in (piece.get("function") or {}).items():
            call["function"][name] += text or ""


def rewritten(arguments):
    """The same arguments as another JSON library would write them; invalid JSON stays unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, indent=1)
    except ValueError:
        return arguments


class Harness:
    """One rollout."""

    def __init__(
        self, http, url, *, session=None, stream=False, tools=None, ids=True, faithful=False, system="You are a careful agent.", **fields
    ):
        self.http, self.url, self.session, self.stream, self.faithful = http, url, session, stream, faithful
        self.messages = [{"role": "system", "content": system}] if system else []
        self.fields = {"model": MODEL, **fields}
        if tools:
            self.fields["tools"] = tools
        if ids:
            self.fields |= {"return_token_ids": True, "logprobs": True}
        self.replies = []
        """What was added to the history, in order."""
        self.answered = []
        """Every answer with status 200."""
        self.arrived = b""
        """What has arrived of the last answer."""

    def say(self, text):
        self.messages.append({"role": "user", "content": text})
        return self

    def body(self, **fields):
        return {**self.fields, "messages": self.messages, "stream": self.stream, **fields}

    async def ask(self, **fields):
        """Makes a call without continuing from it; returns all its choices."""
        headers = {SESSION_HEADER: self.session} if self.session else {}
        body = self.body(**fields)
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            self.arrived = b""
            async for part in answer.content.iter_any():
                self.arrived += part
            read = read_stream if answer.content_type == "text/event-stream" else read_body
            replies = read(answer.status, self.arrived)
        self.answered += [reply for reply in replies if reply.status == 200]
        return replies

    def echo(self, reply):
        """The message that this harness keeps of a reply: rewritten, or, if `faithful`, unchanged."""
        if self.faithful:
            kept = {name: reply.message[name] for name in ("content", "reasoning", "tool_calls") if reply.message.get(name)}
            return {"role": "assistant", "content": None, **kept}
        message = {"role": "assistant", "content": reply.text.strip()}
        if reply.calls:
            message["tool_calls"] = [
                call | {"function": {"name": call["function"]["name"], "arguments": rewritten(call["function"]["arguments"])}}
                for call in reply.calls
            ]
        return message

    def take(self, reply, *, answer="ok: a.txt\n"):
        """Continues from a reply: it joins the history, and its calls are answered."""
        self.replies.append(reply)
        self.messages.append(self.echo(reply))
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": answer} for call in reply.calls]
        return reply

    async def turn(self, *, then="Go on.", answer="ok: a.txt\n", **fields):
        """Makes a call, takes the first choice, and adds a user message if there were no calls to answer."""
        (reply, *_) = await self.ask(**fields)
        assert reply.status == 200, reply.raw
        self.take(reply, answer=answer)
        if not reply.calls:
            self.say(then)
        return reply

    @property
    def contiguous(self):
        """How many turns extend the previous one, and how many have one."""
        pairs = list(zip(self.replies, self.replies[1:], strict=False))
        return sum(later.extends(earlier) for earlier, later in pairs), len(pairs)
