r"""A scripted agent harness that runs the loop of a real one and, like a real one, changes the history that it sends back.

    harness = ScriptedHarness("http://127.0.0.1:8100/v1", headers={"X-Tokencache-Session": "r1"}, model="sim", tools=TOOLS)
    episode = await harness.run("Fix the failing test.", turns=8)

It receives text, like any OpenAI client, and keeps its own history, as real harnesses do. It never sends a reply back unchanged:

* reasoning is dropped, text is stripped;
* empty content is `null`, `""` or absent, in turn;
* tool-call arguments are parsed and written again as JavaScript would: keys sorted, no spaces, `10.0` is `10`, `\u00e9` is `é`. Arguments
  that are not JSON are sent back unchanged;
* tool results are made up, always the same for the same call. Some contain special tokens (`<|im_end|>`), one is empty.

After a reply without a call it sends the next of `follow_ups`. It does not know about the proxy, which sees only its HTTP requests.
"""

import json
import math
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from http import HTTPStatus
from typing import Any

import aiohttp

FOLLOW_UPS = (
    "Good. Now the next one, please.",
    "  Are you sure? Check it again — with `<|im_end|>` in the input, too.\n",
    "Merci ! Et maintenant la même chose pour le café ☕ ?",
)
"""User messages after a reply without a call, in turn."""

_OUTPUTS = (
    "total 3\n-rw-r--r-- 1 agent agent  812 prices.py\n-rw-r--r-- 1 agent agent 2044 café.csv\ndrwxr-xr-x 2 agent agent 4096 tests\n",
    "FAILED tests/test_prices.py::test_half - AssertionError: assert '1.00' == '1.01'\n1 failed, 3 passed in 0.02s\n",
    'def close(turn):\n    return turn + "<|im_end|>\\n"  # <|im_end|> ends a turn, <|im_start|>user opens the next\n',
    "",
    '{"rows": 3, "names": ["Zürich", "北京", "naïve"], "took": 1.50}',
    "4 passed in 0.03s\n<|endoftext|></think></tool_response>\n",
)
_JS_PLAIN, _JS_SMALL = 21, -6
"""ECMAScript writes a number without an exponent if its decimal point is within these limits."""


class CallFailedError(Exception):
    """The server returned an error, or its stream ended early. The message contains its text."""


@dataclass(slots=True)
class Episode:
    """One run of the harness.

    Attributes:
        messages: the history of the harness, which its next request would contain.
        replies: each turn's message as received: `content`, `reasoning`, `tool_calls`, and `finish_reason`.
        usage: each turn's token counts as received.
    """

    messages: list[dict[str, Any]]
    replies: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class ScriptedHarness:
    """An agent that runs the same way every time.

    `base_url` is that of an OpenAI client, with `/v1`. `tools` are in OpenAI's form; `tool` returns the result of a call from its name and
    its arguments as JSON text. `follow_ups` are user messages after a reply without a call. `extra` are members of every request's body.
    """

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = "sim"
    tools: Sequence[Mapping[str, Any]] = ()
    streaming: bool = False
    system: str = "You are a careful software engineer."
    follow_ups: Sequence[str] = FOLLOW_UPS
    tool: Callable[[str, str], str] = field(default_factory=lambda: tool_output)
    extra: Mapping[str, Any] = field(default_factory=dict)
    on_turn: Callable[[], None] | None = None

    async def run(self, task: str, turns: int) -> Episode:
        """Run a task for a number of turns.

        Raises:
            CallFailedError: the server returned an error, or its stream ended early.
            aiohttp.ClientError: the server cannot be reached.
        """
        episode = Episode([{"role": "system", "content": self.system}, {"role": "user", "content": task}])
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as client:
            for turn in range(turns):
                reply, usage = await self._ask(client, episode.messages)
                episode.replies.append(reply)
                episode.usage.append(usage)
                calls = reply["tool_calls"]
                episode.messages.append(_to_history(reply, turn))
                episode.messages += [self._result(call) for call in calls]
                if not calls:
                    said = sum(message["role"] == "user" for message in episode.messages) - 1
                    episode.messages.append({"role": "user", "content": self.follow_ups[said % len(self.follow_ups)]})
                if self.on_turn is not None:
                    self.on_turn()
        return episode

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {"role": "tool", "tool_call_id": call["id"], "content": self.tool(function["name"], function["arguments"])}

    async def _ask(self, client: aiohttp.ClientSession, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Make one model call. Returns the message with its finish reason, and the usage."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": self.streaming, **self.extra}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.streaming:
            body["stream_options"] = {"include_usage": True}
        async with client.post(f"{self.base_url.rstrip('/')}/chat/completions", json=body) as answer:
            if answer.status != HTTPStatus.OK:
                raise CallFailedError(f"{answer.status} {answer.reason}: {(await answer.text())[:500]}")
            if self.streaming:
                return await _collect(answer.content.iter_any())
            whole = await answer.json()
        choice = whole["choices"][0]
        message = choice["message"]
        reply = {name: message.get(name) for name in ("content", "reasoning")}
        return reply | {"tool_calls": message.get("tool_calls") or [], "finish_reason": choice["finish_reason"]}, whole.get("usage") or {}


async def _collect(chunks: AsyncIterator[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a streamed reply, as an OpenAI client does."""
    reply: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": [], "finish_reason": None}
    usage: dict[str, Any] = {}
    pending, done = b"", False
    async for data in chunks:
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            done = done or payload == b"[DONE]"
            if done or event.lstrip().startswith(b":"):
                continue
            chunk = json.loads(payload)
            if "error" in chunk:
                raise CallFailedError(f"an error within the stream: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                _add(reply, choice["delta"])
                reply["finish_reason"] = choice.get("finish_reason") or reply["finish_reason"]
    if not done or reply["finish_reason"] is None:
        raise CallFailedError("the stream ended early")
    return reply, usage


def _add(reply: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning"):
        if delta.get(name):
            reply[name] = (reply[name] or "") + delta[name]
    calls = reply["tool_calls"]
    for part in delta.get("tool_calls") or []:
        while len(calls) <= part["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, said = calls[part["index"]], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += said.get("name") or ""
        call["function"]["arguments"] += said.get("arguments") or ""


def _to_history(reply: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """Make the history's message from a reply, with the changes that the module docstring lists."""
    content = (reply["content"] or "").strip()
    message: dict[str, Any] = {"role": "assistant"}
    if content or not reply["tool_calls"] or turn % 3 < 2:  # noqa: PLR2004 - every third time the key is absent
        message["content"] = content or (None if turn % 3 and reply["tool_calls"] else "")
    if reply["tool_calls"]:
        message["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {**call["function"], "arguments": rewrite(call["function"]["arguments"])}}
            for call in reply["tool_calls"]
        ]
    return message


def tool_output(name: str, arguments: str) -> str:
    """Make up the output of a tool. It depends on the name and the value of the arguments."""
    return _OUTPUTS[zlib.crc32(f"{name} {rewrite(arguments)}".encode()) % len(_OUTPUTS)]


def rewrite(text: str) -> str:
    """Write JSON again as `JSON.stringify` does, with sorted keys. A text that is not JSON stays unchanged."""
    try:
        return _stringify(json.loads(text))
    except ValueError:
        return text


def _stringify(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{_stringify(key)}:{_stringify(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(map(_stringify, value)) + "]"
        case bool() | None | str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return _number(value)


def _number(value: float) -> str:
    """Write a number as ECMAScript does (Number::toString): the shortest digits of the nearest double."""
    try:
        double = float(value)
    except OverflowError:
        double = math.inf
    if not double or not math.isfinite(double):
        return "null" if double else "0"
    sign, figures, exponent = Decimal(repr(double)).normalize().as_tuple()
    digits, minus = "".join(map(str, figures)), "-" if sign else ""
    point = len(digits) + int(exponent)
    if len(digits) <= point <= _JS_PLAIN:
        return minus + digits.ljust(point, "0")
    if 0 < point <= _JS_PLAIN:
        return f"{minus}{digits[:point]}.{digits[point:]}"
    if _JS_SMALL < point <= 0:
        return f"{minus}0.{digits.rjust(len(digits) - point, '0')}"
    mantissa = digits[0] + (f".{digits[1:]}" if len(digits) > 1 else "")
    return f"{minus}{mantissa}e{point - 1:+d}"
