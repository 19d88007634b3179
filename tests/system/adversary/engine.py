"""An engine in this process: it renders as vLLM does, "samples" ids for the reply that the test chose, and keeps a ground-truth log.

What an engine does to a reply is played, too:

* a thinking budget (`thinking_token_budget`) puts the end of the thinking in the place of the model's choice
* `max_tokens` cuts a reply, also within a call; the engine then calls it `tool_calls` if it found a call, as vLLM does
* a stop string (`stop`) ends it: its ids stay in the reply, its text does not
* a base model does not stop at its template's end of turn, except where the request names that id (`stop_token_ids`)
* without a reasoning parser the thinking stays in the text
"""

from __future__ import annotations

import functools
import json
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import msgspec
from jinja2.ext import loopcontrols

from tests.engine.template.template_lab import UNASKED, Kind, Lab, Vocabulary, _compiled, own_stop, speech
from tokencache.core import ids
from tokencache.core.forced import ThinkingMarks
from tokencache.engine.template.renderer import TemplateRefusedError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tokencache.dialects.chat.rendering import RenderArgs

MODEL = "m"
THINKING = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>"))
"""What begins and ends a thought."""
_OPENING = re.compile("|".join(re.escape(begin) for begin, _ in THINKING))
PARTS = frozenset(
    {
        *("hermes", "xml", "glm", "llama", "deepseek", "deepseek-3.1", "toolcall", "kimi", "minimax", "pythonic"),
        *("olmo", "granite", "phi", "seed"),
    }
)
"""Styles whose replies are thinking, text and calls in this order, with nothing between them: the beginning of one can be read."""
_END = "ENDqz"
"""Marks the end of the last message, where a reply that continues it begins."""

Message = dict[str, Any]


class RefusedError(Exception):
    """The engine refuses a request, as vLLM does with a 400."""


class Renderer(Lab):
    """The engine's `/tokenize` and `/detokenize`: a `Lab` that accepts all JSON that Python accepts, and refuses what cannot be rendered.

    Templates run without jinja's sandbox, which takes half of the time: these are ours.
    """

    def compiled(self) -> jinja2.Template:
        """See `Lab.compiled`."""
        return _unboxed(self.template)

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:
        """See `Renderer.render`."""
        self.rendered.append(len(messages))
        try:
            tools = json.loads(bytes(args.tools)) if args.tools is not None else None
            continues = "continue_final_message" in args.members and json.loads(bytes(args.members["continue_final_message"]))
            read = [read_message(bytes(raw)) for raw in messages]
            text = self.prompt(read, tools, args.kwargs, generation=generation, continues=continues)
            return ids.pack(self.encode(text))
        except RefusedError as why:
            raise TemplateRefusedError(str(why)) from why

    def encode(self, text: str) -> list[int]:
        """Tokenize. Each text between two added tokens is tokenized separately and remembered, because histories repeat."""
        return [token for piece in _between(self.words).split(text) if piece for token in _piece(self.words, piece)]

    async def read(self, model: str, packed: bytes) -> str:
        """See `EngineRenderer.read`."""
        return self.words.decode(ids.unpack(packed))

    def prompt(
        self, messages: Sequence[Message], tools: Any, kwargs: dict[str, Any], *, generation: bool = True, continues: bool = False
    ) -> str:
        """The prompt of a conversation as text; with `continues` it ends with the text of the last message.

        Raises:
            RefusedError: whatever the template, or the tokenizer, does not take.
        """
        members = ("name", "description", "parameters")
        offered = [{"type": "function", "function": {m: tool["function"].get(m) for m in members}} for tool in tools or ()]
        if continues:
            *earlier, last = messages
            shown = self.prompt([*earlier, {**last, "content": f"{last.get('content') or ''}{_END}"}], tools, kwargs, generation=False)
            if _END not in shown:
                raise RefusedError("the template does not show the last message")
            return shown[: shown.rindex(_END)]
        try:
            text = self.text(list(map(_with_reasoning, messages)), offered or None, generation=generation, **kwargs)
            text.encode()
        except Exception as why:
            raise RefusedError(f"{type(why).__name__}: {why}") from why
        return text


@functools.lru_cache(maxsize=64)
def _unboxed(template: str) -> jinja2.Template:
    """A template with the filters and functions that transformers gives it."""
    boxed = _compiled(template).environment
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False)  # noqa: S701 - no HTML
    environment.filters, environment.globals = boxed.filters, boxed.globals
    return environment.from_string(template)


@functools.lru_cache(maxsize=64)
def _between(words: Vocabulary) -> re.Pattern[str]:
    """A pattern of the added tokens, which are matched before other text."""
    added = sorted((token.content for token in words.backend.get_added_tokens_decoder().values()), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, added))})")


@functools.lru_cache(maxsize=50_000)
def _piece(words: Vocabulary, text: str) -> tuple[int, ...]:
    return tuple(words.encode(text))


@functools.lru_cache(maxsize=20_000)
def read_message(raw: bytes) -> Message:
    """A message's JSON as Python reads it; callers must not change the result."""
    return json.loads(raw)


def _with_reasoning(message: Message) -> Message:
    """Chat completions take reasoning under two names."""
    inner = message.get("reasoning_content")
    return {**message, "reasoning": inner} if inner is not None and message.get("reasoning") is None else message


@dataclass
class Generation:
    """One generation in the engine's ground-truth log.

    Attributes:
        forced: the half-open ranges of the completion that a thinking budget forced.
        cut: whether the limit of tokens ended it; `label` is the finish reason that the engine gives.
        message: what the engine's parsers make of it.
        thought: the text of its thinking, also where the message has none.
        stop: the stop string that ended it.
        served: the number of characters of its text that the client gets; what follows is a stop string, or an id that has no text.
        ends: the numbers of characters of its text before its calls, up to the end of the first call, and so on; empty if that is unknown.
        begins: the numbers of characters of its text before its reasoning, and before what its message has as its text.
        begun: of a reply that was broken off within its first call: that call as its client received it.
    """

    session: str
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    forced: tuple[tuple[int, int], ...] = ()
    cut: bool = False
    label: str = "stop"
    message: Message = field(default_factory=dict)
    thought: str = ""
    served: int = 0
    stop: str = ""
    ends: tuple[int, ...] = ()
    begins: tuple[int, int] = (0, 0)
    begun: Message = field(default_factory=dict)


class Speech(NamedTuple):
    """What the model means to write: its thinking, then the text of the message, then its calls.

    `calls` are the texts of the first call, of the first two, and so on. Where a part of the reply cannot be read, `thinking` is all of it.
    """

    message: Message
    thinking: str
    thought: str
    calls: tuple[str, ...] = ()
    readable: bool = True

    @property
    def text(self) -> str:
        return self.thinking + (_encodable(self.message.get("content") or "") + "".join(self.calls[-1:]) if self.readable else "")


class Engine:
    """An engine that renders, samples the given reply, and keeps a ground-truth log. `rng` chooses ids and log probabilities.

    Attributes:
        base: whether it stops by itself at another id than its template writes.
        parses: whether it has a reasoning parser.
        thinking: what begins and ends a thought; `None` if the model has no tokens for them.
        forced: the text that a thinking budget forces.
        restarts: whether its budget counts anew where a thought begins within another.
    """

    def __init__(self, kind: Kind, renderer: Renderer, rng: random.Random, *, base: bool = False, parses: bool = True) -> None:
        self.kind, self.renderer, self._rng = kind, renderer, rng
        self.base, self.parses = base, parses
        self.reads_parts = kind.style in PARTS and kind.stops[0] != "<SPECIAL_12>"  # Nemotron Nano ends its words with a newline
        self.thinking = next((pair for pair in THINKING if set(pair) <= set(kind.tokens)), None) if self.reads_parts else None
        self.forced = rng.choice(["", "Enough.\n"]) + self.thinking[1] if self.thinking else ""
        self.restarts = rng.random() < 0.5
        self.ground_truth: list[Generation] = []

    def thinking_marks(self) -> ThinkingMarks | None:
        """The packed ids that begin, end, and forcibly end a thought; `None` if the model has no tokens for them."""
        if self.thinking is None:
            return None
        return ThinkingMarks(*(ids.pack(self.renderer.encode(text)) for text in (*self.thinking, self.forced)))

    def ends(self) -> list[int]:
        """The ids at which the model ends a turn."""
        return [self.renderer.words.id_of(stop) for stop in self.kind.stops]

    def generate(self, session: str, body: dict[str, Any], exact: bytes | None, reply: Message) -> tuple[bytes, Generation]:
        """Answer a chat request.

        Raises:
            RefusedError: it cannot be rendered.
        """
        continues = bool(body.get("continue_final_message"))
        if exact is None:
            tools, kwargs = template_arguments(body)
            text = self.renderer.prompt(body["messages"], tools, kwargs, continues=continues)
            prompt = self.renderer.encode(text)
        else:
            prompt = ids.unpack(exact)
            text = self.renderer.words.decode(prompt[-40:])
        planned = Speech({"role": "assistant", "content": reply.get("content")}, "", "") if continues else self._planned(text, reply)
        generation, stop_reason = self._sample(session, prompt, planned, body)
        generation.logprobs = [_float32(-3 * self._rng.random()) for _ in generation.completion]
        self.ground_truth.append(generation)
        return _completion(generation, stop_reason, len(self.ground_truth)), generation

    def _planned(self, prompt: str, reply: Message) -> Speech:
        """What the model writes after this prompt, in its own format."""
        said = {**reply, "tool_calls": [_sayable(call) for call in reply.get("tool_calls") or ()]}

        def written(**members: Any) -> str:
            return _encodable(speech(self.kind, {**said, **members}, prompt))

        thought = reply.get("reasoning") or ""
        if not self.reads_parts:
            return Speech(reply, written(), thought, readable=False)
        thinking = written(content="", tool_calls=[])
        head = len(thinking) + len(_encodable(reply.get("content") or ""))
        calls = tuple(written(tool_calls=said["tool_calls"][: n + 1])[head:] for n in range(len(said["tool_calls"])))
        return Speech(reply, thinking, thought or (UNASKED if UNASKED in thinking else ""), calls)

    def _spell(self, text: str) -> list[int]:
        """The ids with which the model writes a text."""
        return self.renderer.words.sampled(text, self._rng)

    def _sample(self, session: str, prompt: list[int], planned: Speech, body: dict[str, Any]) -> tuple[Generation, int | str | None]:
        """Sample the reply; return also what ended it, besides the model's own stop id."""
        words, named, reason = self.renderer.words, body.get("stop_token_ids") or (), None
        tokens = self._spell(planned.text)
        stop = words.id_of(own_stop(self.kind, planned.message))
        if planned.message.get("finish_reason") != "length" and (stop in named or not self.base):
            tokens.append(stop)
        forced: tuple[tuple[int, int], ...] = ()
        if self.thinking is not None and (budget := body.get("thinking_token_budget")) is not None:
            planned, tokens, forced = self._force(planned, prompt, tokens, budget)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(tokens)
        cut = len(tokens) > limit or (tokens[-1:] != [stop])
        tokens = tokens[:limit]
        if tokens[-1:] == [stop] and self.base:
            reason = stop
        text = words.decode(tokens[:-1] if tokens[-1:] == [stop] else tokens).rstrip("\ufffd")
        for end in body.get("stop") or ():
            if end in text:
                n = next(n for n in range(len(tokens) + 1) if end in words.decode(tokens[:n]))
                tokens, text, reason, cut = tokens[:n], text[: text.index(end)], end, False
        forced = tuple((start, min(end, len(tokens))) for start, end in forced if start < len(tokens))
        message, served = self._heard(planned, text)
        # vLLM calls a whole reply with a call `tool_calls`, also if the limit cut the next one
        label = planned.message.get("finish_reason") or ("tool_calls" if message.get("tool_calls") else "length" if cut else "stop")
        head = len(planned.thinking) + len(_encodable(planned.message.get("content") or ""))
        whole = planned.readable and text == planned.text and not cut
        ends = (head, *(head + len(calls) for calls in planned.calls)) if whole else ()
        opened = _OPENING.match(text)
        begins = (
            text.find(message.get("reasoning") or "", opened.end() if opened else 0),
            0 if self._thinks_in_text(planned) else len(planned.thinking),
        )
        ended_by = reason if isinstance(reason, str) else ""
        return Generation(session, prompt, tokens, [], forced, cut, label, message, planned.thought, served, ended_by, ends, begins), reason

    def break_off_text(self, generation: Generation, rng: random.Random) -> list[bytes]:
        """Break a reply off before its first call, or within it; return the stream (JSON) up to there.

        The client keeps what it had received up to some event, and nothing of a call.
        """
        tokens, ends, said = generation.completion, generation.ends, generation.message
        known = [self.renderer.words.decode(tokens[:n]).rstrip("\ufffd") for n in range(len(tokens) + 1)]
        last = next((n for n, text in enumerate(known) if len(ends) > 1 and len(text) >= ends[1]), len(tokens))
        until, late = rng.randrange(1, max(last, 2)), rng.choice([0, 0, 0, 1, 2])
        wanted = dict(zip(("reasoning", "content"), generation.begins, strict=True))
        events: list[Message] = []
        for n in range(1, until + 1):
            read = known[n if len(known[n]) >= ends[0] else max(n - late, 0)]  # a parser may hold text back
            events.append({name: (said.get(name) or "")[: max(len(read) - begin, 0)] for name, begin in wanted.items()})
        has = events[rng.choice([until, until, rng.randrange(until) + 1]) - 1]
        chunks = [_chunk(generation, 0, {"role": "assistant", "content": ""})]
        before: Message = dict.fromkeys(wanted, "")
        for n, event in enumerate(events, 1):
            delta: Message = {name: event[name].removeprefix(before[name]) for name in wanted if event[name] != before[name]}
            if len(ends) > 1 and len(known[n]) > ends[0] + 20 and len(known[n - 1]) <= ends[0] + 20:
                call = said["tool_calls"][0]
                named = {"index": 0, "id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}
                delta["tool_calls"], generation.begun = [named], named
            chunks.append(_chunk(generation, n, delta))
            before = event
        generation.completion, generation.logprobs = tokens[:until], generation.logprobs[:until]
        generation.forced = tuple((start, min(end, until)) for start, end in generation.forced if start < until)
        thought = {"reasoning": has["reasoning"]} if has["reasoning"] else {}
        generation.message = {"role": "assistant", "content": has["content"] or None, **thought}
        name = "content" if has["content"] else "reasoning"
        generation.served, generation.label, generation.ends = wanted[name] + len(has[name]), "abort", ends[:1]
        return chunks

    def break_off(self, generation: Generation, calls: int, rng: random.Random) -> list[bytes]:
        """Break a reply off after so many of its calls, or within the next one; return the stream (JSON) up to there."""
        tokens, ends, said = generation.completion, generation.ends, generation.message
        lengths = [len(self.renderer.words.decode(tokens[:n])) for n in range(len(tokens) + 1)]

        def reached(length: int) -> int:
            return next((n for n, so_far in enumerate(lengths) if so_far >= length), len(tokens))

        first, last = reached(ends[calls]), reached(ends[calls + 1]) if calls + 1 < len(ends) else len(tokens)
        until = rng.randrange(first, max(last, first + 1))
        deltas: list[tuple[int, Message]] = [(reached(ends[0]), {"content": said.get("content"), "reasoning": said.get("reasoning")})]
        for n, call in enumerate(said["tool_calls"][: calls + 1]):
            named = {"index": n, "id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}
            deltas.append((reached(min(ends[n] + 20, ends[n + 1] - 1)), {"tool_calls": [named]}))
            deltas.append((reached(ends[n + 1]), {"tool_calls": [{"index": n, "function": {"arguments": call["function"]["arguments"]}}]}))
        generation.completion, generation.logprobs = tokens[:until], generation.logprobs[:until]
        generation.message = {**said, "tool_calls": said["tool_calls"][:calls]}
        generation.served, generation.label, generation.ends = ends[calls], "abort", ends[: calls + 1]
        chunks = [_chunk(generation, 0, {"role": "assistant", "content": ""})]
        for n in range(1, until + 1):
            now = [delta for at, delta in deltas if max(at, 1) == n and not (at >= last and calls + 1 < len(ends))]
            merged = {"tool_calls": listed} if (listed := [call for delta in now for call in delta.get("tool_calls", ())]) else {}
            chunks.append(_chunk(generation, n, {name: value for delta in now for name, value in delta.items()} | merged))
        return chunks

    def _force(
        self, planned: Speech, prompt: list[int], tokens: list[int], budget: int
    ) -> tuple[Speech, list[int], tuple[tuple[int, int], ...]]:
        """End a thought after as many tokens as the budget allows; the model goes on with what it means to say after thinking."""
        assert self.thinking is not None
        begin, end = map(self.renderer.words.id_of, self.thinking)
        places = [i for i, token in enumerate(prompt) if token in {begin, end}]
        begun = places[-1] + 1 - len(prompt) if places and prompt[places[-1]] == begin else None
        for at, token in enumerate(tokens):
            if begun is not None and at >= max(begun + budget, 0):
                break
            if token == begin and (begun is None or self.restarts):
                begun = at + 1
            elif token == end:
                begun = None
        else:
            return planned, tokens, ()
        decode, forced, said = self.renderer.words.decode, self.renderer.encode(self.forced), planned.message
        before = decode(tokens[:at])
        thought = (before.partition(self.thinking[0])[2] if self.thinking[0] in before else before) + self.forced.removesuffix(
            self.thinking[1]
        )
        if end in tokens[at:]:
            rest = tokens[tokens.index(end, at) + 1 :]
            thinking = before + self.forced + planned.thinking.partition(self.thinking[1])[2]
            said = {**said, "reasoning": thought.strip()} if said.get("reasoning") else said
            planned = Speech(said, thinking, thought.strip(), planned.calls)
        else:  # the model was not thinking
            rest = tokens[at:]
            shown = rest[:-1] if rest[-1:] and rest[-1] in self.ends() else rest
            said = {"role": "assistant", "content": decode(shown) or None, "reasoning": thought.strip() or None}
            planned = Speech(said, before + self.forced, thought.strip())
        return planned, [*tokens[:at], *forced, *rest], ((at, at + len(forced)),)

    def _thinks_in_text(self, planned: Speech) -> bool:
        """Whether a client receives the thinking as text: without a parser of reasoning, if the reply begins with a thought."""
        return not self.parses and self.thinking is not None and planned.thinking.startswith(self.thinking[0])

    def _heard(self, planned: Speech, text: str) -> tuple[Message, int]:
        """The message as the engine's parsers read it in this text, which may be only the beginning of what was planned.

        Also returns how many characters of the text they read: not those of a call that is not complete.
        """
        message = {"role": "assistant", **planned.message}
        message.pop("finish_reason", None)
        if not planned.readable:
            return message, len(text)
        served = len(text)
        content, calls = text[len(planned.thinking) :], list(message.get("tool_calls") or ())
        if text != planned.text:
            said = _encodable(message.get("content") or "")
            whole = next((n for n in range(len(calls), 0, -1) if content.startswith(said + planned.calls[n - 1])), 0)
            served = min(served, len(planned.thinking + said) + (len(planned.calls[whole - 1]) if whole else 0))
            message = {"role": "assistant", "content": content[: len(said)] or None}
            message |= {"tool_calls": calls[:whole]} if whole else {}
            if thought := planned.message.get("reasoning"):
                message["reasoning"] = thought if content else text.partition(self.thinking[0])[2].strip() if self.thinking else thought
        if self._thinks_in_text(planned):
            message = {**message, "content": text[: len(planned.thinking)] + (message.get("content") or "")}
            message.pop("reasoning", None)
        return message, served


def template_arguments(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tools and template arguments that vLLM takes from a request's members."""
    read = {name: json.loads(bytes(raw)) if isinstance(raw, msgspec.Raw) else raw for name, raw in fields.items() if name != "messages"}
    kwargs = dict(read.get("chat_template_kwargs") or {})
    if read.get("documents") is not None:
        kwargs["documents"] = read["documents"]
    if (effort := read.get("reasoning_effort")) is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    return read.get("tools"), kwargs


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _sayable(call: Message) -> Message:
    """A call whose arguments `speech` can write: a value that is not an object becomes the value of a member."""
    arguments = call["function"]["arguments"]
    try:
        said = json.loads(arguments)
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {"raw": arguments}
    return {**call, "function": {**call["function"], "arguments": json.dumps(said)}}


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _chunk(generation: Generation, number: int, delta: Message) -> bytes:
    """A chunk of a stream with one token, or with the prompt."""
    sampled = [*zip(generation.completion, generation.logprobs, strict=True)][max(number - 1, 0) : number]
    listed = [{"token": f"token_id:{token}", "logprob": chance, "bytes": None, "top_logprobs": []} for token, chance in sampled]
    choice = {"index": 0, "delta": delta, "logprobs": {"content": listed} if listed else None, "finish_reason": None}
    choice["token_ids"] = [token for token, _ in sampled]
    whole = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
    return msgspec.json.encode(whole | ({} if number else {"prompt_token_ids": generation.prompt}))


def _completion(generation: Generation, stop_reason: int | str | None, number: int) -> bytes:
    """The body of vLLM's answer."""
    said = generation.message
    calls = said.get("tool_calls") or []
    message = {"role": "assistant", "content": said.get("content"), "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "reasoning": said.get("reasoning")} | ({"tool_calls": calls} if calls else {})
    sampled = zip(generation.completion, generation.logprobs, strict=True)
    listed = [{"token": f"token_id:{token}", "logprob": chance, "bytes": None, "top_logprobs": []} for token, chance in sampled]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": listed},
        "finish_reason": generation.label,
        "stop_reason": stop_reason,
        "token_ids": generation.completion,
    }
    counted = {"prompt_tokens": len(generation.prompt), "completion_tokens": len(generation.completion)}
    whole = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
    whole |= {"usage": counted | {"total_tokens": sum(counted.values())}, "prompt_token_ids": generation.prompt}
    return msgspec.json.encode(whole)
