"""Tests whether a thought in an earlier reply changes how an engine treats the next reply after an exact prompt.

A template may drop earlier thoughts; an exact prompt keeps them. Some of vLLM's reasoning parsers look for the last mark of a thought
anywhere in the prompt (0.32, `is_reasoning_end`; `docs/engines.md` names them). If the generation prompt has no mark,
they find that of an earlier reply, and take the next reply for text from its first token on. Then

`stream`   a streamed reply has its thought in the text
`grammar`  a grammar binds the reply at once, and not after its thought
`budget`   a thinking budget counts from another place
`whole`    a whole reply has its thought in the text (no parser of vLLM 0.32)

No answer names the parser. So the test sends the same small requests after exact prompts that differ only in an earlier thought. What is
sampled does not depend on the model: masks and biases allow one id. Requests that the engine refuses show nothing. If neither streams nor
budgets change, nothing else is asked, because all of it follows from one reading of the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.sampling import BUDGET
from tokencache.dialects.sse import DONE, EventSplitter, data_of
from tokencache.engine.reply import Choice, Reply
from tokencache.engine.template.renderer import EngineRenderer
from tokencache.engine.thinking import MARKS
from tokencache.engine.upstream import AskChat

Part = Literal["stream", "grammar", "budget", "whole"]
PARTS: tuple[Part, ...] = ("stream", "grammar", "budget", "whole")
_TEXT = "One"
_CHOICE = ("two", " two")
"""The texts that the grammar allows: a tokenizer may write a space before the first word."""
_STRONG_BIAS = 100


class EarlierThoughts(msgspec.Struct, frozen=True):
    """What a thought in an earlier reply changes.

    Attributes:
        begin, end: the ids that begin and end it; empty if it changes nothing.
        closed: what changes after a thought that has ended.
        open: what changes after a thought that has not ended, because the reply was cut off.
        begun: what changes after a thought that has ended, although the generation prompt begins another one (`step3`).
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    closed: tuple[Part, ...] = ()
    open: tuple[Part, ...] = ()
    begun: tuple[Part, ...] = ()

    def changed(self, history: bytes, tail: bytes) -> tuple[Part, ...]:
        """Return what earlier thoughts change for the reply after a prompt: a history up to its last reply, and the tail (packed ids).

        If the tail ends a thought, it does so for a direct call as well. A mark of several ids may be written with others in a reply, so
        every prompt may have it.
        """
        if len(self.end) != 1 or len(self.begin) != 1:
            return self.closed
        begin, end = ids.pack(self.begin), ids.pack(self.end)
        begins, ends = ids.find_last(tail, begin), ids.find_last(tail, end)
        if ends > begins:
            return ()
        began, ended = ids.find_last(history, begin), ids.find_last(history, end)
        if max(began, ended) < 0:
            return ()
        if begins >= 0:
            return self.begun if ended >= 0 else ()
        return self.closed if ended > began else self.open

    def __str__(self) -> str:
        """Say what they change."""
        kinds = {"closed": self.closed, "open": self.open, "begun": self.begun}
        found = [f"{kind}: {', '.join(parts)}" for kind, parts in kinds.items() if parts]
        return "; ".join(found) or "change nothing"


NO_EFFECT = EarlierThoughts()


async def find_earlier_thoughts(
    ask: AskChat,
    renderer: EngineRenderer,
    members: Mapping[str, Any],
    plain: bytes,
    supply: Callable[[list[int]], dict[str, Any]],
    *,
    streams: bool,
) -> EarlierThoughts:
    """Find what a thought in an earlier reply changes.

    Args:
        ask: sends a chat request.
        renderer: tokenizes the openers and closers of thoughts.
        members: the members of all requests: the model, and what the parser reads (`dialects.members.PARSED`).
        plain: packed ids of any prompt that ends with a generation prompt.
        supply: returns the members of a chat request whose prompt has, or begins with, the given ids.
        streams: whether the driver requests streams.

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    model = members["model"]
    words = [await renderer.encode(model, text) for text in (_TEXT, *_CHOICE)]
    pairs = [(await renderer.encode(model, opener), await renderer.encode(model, closer)) for opener, closer in MARKS]
    marks = [(begin, end) for begin, end in pairs if begin and end]
    if not all(words) or not marks:
        return NO_EFFECT
    before = ids.unpack(plain)
    closed, unclosed = [[*begin, *words[0], *end, *words[0]] for begin, end in marks], [[*begin, *words[0]] for begin, _ in marks]
    openers = {begin[0] for begin, _ in marks if len(begin) == 1}
    probe = _Probe(ask, {**members, **_FIXED}, supply, sorted(openers), [word[0] for word in words])

    async def changed(parts: tuple[Part, ...], thoughts: Sequence[list[int]], opened: Sequence[int] = ()) -> tuple[Part, ...]:
        earlier = [token for thought in thoughts for token in thought]
        return await probe.changed(parts, [*before, *before, *opened], [*before, *earlier, *before, *opened])

    decisive: tuple[Part, ...] = ("stream", "budget") if streams else ("whole", "grammar", "budget")
    suspected = [await changed(decisive, thoughts) for thoughts in (closed, unclosed)]
    if not any(suspected):
        return NO_EFFECT
    parts = [PARTS if {*found} - {"budget"} else found for found in suspected]
    for (begin, end), whole, half in zip(marks, closed, unclosed, strict=True):
        after_closed, after_open = await changed(parts[0], [whole]), await changed(parts[1], [half])
        if after_closed or after_open:
            begun = await changed(PARTS, [whole], begin) if after_closed else ()
            return EarlierThoughts(tuple(begin), tuple(end), after_closed, after_open, begun)
    return NO_EFFECT


_FIXED: Mapping[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class _Probe:
    """Compares how an engine treats replies after two prompts."""

    def __init__(
        self,
        ask: AskChat,
        members: Mapping[str, Any],
        supply: Callable[[list[int]], dict[str, Any]],
        openers: Sequence[int],
        words: Sequence[int],
    ) -> None:
        """Create a probe.

        Args:
            ask: sends a chat request.
            members: the members of all requests.
            supply: returns the members of a chat request whose prompt has, or begins with, the given ids.
            openers: ids that begin a thought by themselves.
            words: the id of a text, and ids with which the texts begin that the grammar allows.
        """
        self._ask, self._members, self._supply, self._openers = ask, members, supply, openers
        self._word, *self._bound = words
        self._seen: dict[tuple[Part, tuple[int, ...]], Any] = {}

    async def changed(self, parts: Sequence[Part], one: Sequence[int], other: Sequence[int]) -> tuple[Part, ...]:
        """Return which of these parts differ between two prompts. A part that the engine does not show does not differ.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        found = []
        for part in parts:
            first, second = [await self._shown(part, tuple(prompt)) for prompt in (one, other)]
            if first is not None and second is not None and first != second:
                found.append(part)
        return tuple(found)

    async def _shown(self, part: Part, prompt: tuple[int, ...]) -> Any:
        if (part, prompt) not in self._seen:
            shows = {"grammar": self._grammar, "budget": self._budget}.get(part)
            self._seen[part, prompt] = await (shows(prompt) if shows is not None else self._said(prompt, stream=part == "stream"))
        return self._seen[part, prompt]

    async def _said(self, prompt: Sequence[int], *, stream: bool) -> list[str] | None:
        """Return the text beside the thoughts, of replies that begin a thought and of one that does not.

        The thoughts themselves show nothing: if vLLM's server lags behind, several tokens arrive at once, and then some of its parsers
        leave the mark that begins a thought in it (0.32, `basic_parsers.py`).
        """
        said = []
        for token in (*self._openers, self._word):
            reply = await self._sampled(prompt, {"allowed_token_ids": [token], "stream": stream})
            if reply is None or set(reply.ids) != {token}:
                return None
            said.append("".join(reply.content))
        return said

    async def _grammar(self, prompt: Sequence[int]) -> bool | None:
        """Whether the reply's first token is free: the engine prefers a text that the grammar does not allow."""
        allowed = {"allowed_token_ids": [self._word, *self._bound], "logit_bias": {str(self._word): _STRONG_BIAS}}
        reply = await self._sampled(prompt, {**allowed, "structured_outputs": {"choice": _CHOICE}, "max_tokens": 1})
        return reply.ids[0] == self._word if reply is not None and reply.ids[0] in {self._word, *self._bound} else None

    async def _budget(self, prompt: Sequence[int]) -> list[int] | None:
        """Return the ids of a reply whose thought may have one token, if it is one."""
        reply = await self._sampled(prompt, {"allowed_token_ids": [self._word], BUDGET: 1})
        return list(reply.ids) if reply is not None and self._word in reply.ids else None

    async def _sampled(self, prompt: Sequence[int], members: Mapping[str, Any]) -> Choice | None:
        """Return a reply; `None` if the engine refuses the request."""
        answer = await self._ask({**self._members, **self._supply([*prompt]), **members})
        choice = read_reply(answer.body).choices.get(0) if answer.status == HTTPStatus.OK else None
        return choice if choice is not None and choice.ids else None


def read_reply(body: bytes) -> Reply:
    """Read the body of an answer: a whole reply, or the events of a stream."""
    reply = Reply()
    chunks = [body] if body.lstrip()[:1] == b"{" else [data_of(event) for event in EventSplitter().feed(body)]
    for data in chunks:
        if data is not None and data != DONE:
            reply.add(data)
    return reply
