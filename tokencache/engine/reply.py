"""Replies: what an engine said, collected chunk by chunk or from a whole body.

Text and token ids do not line up within a chunk of vLLM's stream (partial UTF-8, parsers that hold text back), so each
is gathered on its own: the ids as the engine gives them, the message as the harness sees it.
"""

from typing import Any, Literal

import msgspec

from tokencache.core.messages import Message, ToolCall
from tokencache.dialects import routing
from tokencache.dialects.completion_reader import ReplyMessage
from tokencache.engine import chances, weights
from tokencache.engine.chances import Logprobs
from tokencache.engine.prompt_echo import CUT, EchoedPrompt, given

Raw = msgspec.Raw


class _Choice(msgspec.Struct):
    index: int = 0
    delta: ReplyMessage | None = None
    message: ReplyMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = Raw(b"null")
    logprobs: Logprobs | Literal["="] | None = None  # the mark of `chances.cut`
    weight_versions: list[Any] | None = None
    routed_experts: Raw = Raw(b"null")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: Raw = Raw(b"null")
    model: str = ""
    error: Raw = Raw(b"null")
    metadata: Raw = Raw(b"null")
    sglext: Raw = Raw(b"null")


class _Error(msgspec.Struct):
    code: int = 500


class _Piece(msgspec.Struct):
    """A choice of a plain chunk (`dialects.chat.plain`)."""

    delta: ReplyMessage
    token_ids: list[int]
    logprobs: Logprobs | None = None
    index: int = 0


class _Plain(msgspec.Struct):
    choices: tuple[_Piece]


_CHUNK = msgspec.json.Decoder(_Chunk)
_PLAIN = msgspec.json.Decoder(list[_Plain])
_METADATA = msgspec.json.Decoder(weights.Metadata)
_AT_ONCE = 32
"""Chunks that are read together: more would save little, and wait in memory."""


class Choice:
    """One choice of a reply: sampled ids, their log probabilities, and the message as it was put together."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, list[str]] = {}
        self.steps: list[tuple[int, int, int, int]] = []  # tokens before and after a delta, its characters of content and reasoning
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.versions: list[Any] = []
        self.experts = b""
        """The experts that were routed to: base64 or JSON, as the engine gave them."""
        self.prompt = b""
        """The raw JSON list of its own prompt's ids, where the engine says them with each choice (text completions)."""

    def message(self, *, with_reasoning: bool) -> Message:
        """The message as the harness was given it."""
        return Message(
            "assistant",
            content="".join(self.content) or None,
            reasoning=("".join(self.reasoning) or None) if with_reasoning else None,
            calls=tuple(ToolCall(*self.calls[i]) for i in sorted(self.calls)),
        )

    def take(self, choice: _Choice, pieces: list[bytes]) -> None:
        """Add what one chunk, or a whole body, says of this choice; `pieces` were cut out of it (`routing`)."""
        before = len(self.ids)
        self.ids += choice.token_ids or ()
        if isinstance(choice.logprobs, Logprobs):
            self.logprobs += [item.logprob for item in choice.logprobs.content or ()]
            self.logprobs += [value for value in choice.logprobs.token_logprobs or () if value is not None]
        if bytes(choice.prompt_token_ids) != CUT:
            self.prompt = self.prompt or given(choice.prompt_token_ids)
        said = choice.delta or choice.message or ReplyMessage(content=choice.text)
        self._say(said, before)
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
        self.versions = choice.weight_versions or self.versions
        self.experts = routing.piece_of(bytes(choice.routed_experts), pieces) or self.experts

    def take_plain(self, piece: _Piece) -> None:
        """Add what a plain chunk says of this choice."""
        before = len(self.ids)
        self.ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs += [item.logprob for item in piece.logprobs.content or ()]
        self._say(piece.delta, before)

    def _say(self, said: ReplyMessage, before: int) -> None:
        content, thought = said.content, said.reasoning or said.reasoning_content
        if content:
            self.content.append(content)
        if thought:
            self.reasoning.append(thought)
        if content or thought:
            self.steps.append((before, len(self.ids), len(content or ""), len(thought or "")))
        if said.tool_calls:
            self._call(said)

    def _call(self, said: ReplyMessage) -> None:
        for index, call in said.called():
            parts = self.calls.setdefault(index, ["", "", ""])
            parts[0] = call.id or parts[0]
            parts[1] += call.name
            parts[2] += call.arguments


class Reply:
    """All choices of one call, as they come in.

    Attributes:
        prompt: what the engine says of the prompt's ids; what was sent has to be said to it.
        error: the raw JSON of an error that the engine reported within its reply; `b""` if none.
        unreadable: chunks that could not be read.
        version: the weight version in the answer's header, `""` if there is none.
    """

    def __init__(self, choices: int = 1) -> None:
        self.expected = choices
        self.prompt = EchoedPrompt()
        self._choices: dict[int, Choice] = {}
        self._unread: list[bytes] = []
        self.model = ""
        self.error = b""
        self.unreadable = 0
        self.version = ""
        self._metadata: weights.Metadata | None = None
        self._pieces: list[bytes] = []

    @property
    def choices(self) -> dict[int, Choice]:
        """The choices by their index, as far as they have come."""
        if self._unread:
            self._read()
        return self._choices

    def later(self, data: bytes) -> None:
        """Add a chunk's JSON that says a piece of a choice and nothing more (`dialects.chat.plain`): it is read when somebody looks."""
        self._unread.append(data)
        if len(self._unread) >= _AT_ONCE:
            self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        try:
            chunks = _PLAIN.decode(b"[%s]" % b",".join(unread))
        except (ValueError, RecursionError):  # one of them is no JSON after all: find out which
            for data in unread:
                self.take(data)
            return
        for (piece,) in [chunk.choices for chunk in chunks]:
            self._choice(piece.index).take_plain(piece)

    def _choice(self, index: int) -> Choice:
        held = self._choices.get(index)
        if held is None:
            held = self._choices[index] = Choice()
        return held

    def without_experts(self, data: bytes) -> bytes:
        """Take routed experts out of a chunk's JSON, or a whole body's, before it goes to `take` and to the harness."""
        start, end = self.prompt.find(data)
        if end and not (routing.named(data, 0, start) or routing.named(data, end, len(data))):
            return data  # among hundreds of kilobytes of ids nobody need look
        return routing.cut(data, self._pieces)

    def take(self, data: bytes, *, unseen: bool = False) -> bytes:
        """Add a chunk's JSON, or that of a whole body; `unseen`: its log probabilities are shown to nobody.

        Returns:
            The same JSON; without the ids of the prompt (`EchoedPrompt`), and without log probabilities that are unseen.
        """
        if self._unread:
            self._read()
        brief = cut = self.prompt.cut(data)
        told = None
        if unseen and self.expected == 1:
            brief, told = chances.cut(cut)
        try:
            chunk = _CHUNK.decode(brief)
        except (ValueError, RecursionError):
            self.unreadable += 1
            return data
        echoes = [chunk.prompt_token_ids, *(choice.prompt_token_ids for choice in chunk.choices)]
        if cut is not data and not self._placed(chunk, echoes):
            return self._take_long(data)
        if told is not None and not (_of_chat(chunk) and any(choice.logprobs == chances.CUT for choice in chunk.choices)):
            return self.take(data)  # what was cut out stood elsewhere
        self.model = chunk.model or self.model
        self.error = self.error or given(chunk.error)
        for echo in echoes:
            self.prompt.hear(echo, cut=cut is not data)
        for choice in chunk.choices:
            if choice.logprobs == chances.CUT:
                choice.logprobs = told
            self._choice(choice.index).take(choice, self._pieces)
        for extra in (chunk.metadata, chunk.sglext):
            self._metadata = self._metadata or _metadata(bytes(extra))
        return brief

    def versions(self, index: int) -> list[Any]:
        """The weight version spans of a choice (`weights.spans`)."""
        choice = self.choices[index]
        return weights.spans(choice.versions, self._metadata if index == 0 else None, self.version, len(choice.ids))

    def _placed(self, chunk: _Chunk, echoes: list[Raw]) -> bool:
        """Whether the ids that were cut out are what counts, in a reply; unless they were sent, in a chat's: each text has its own."""
        first = next(filter(None, map(given, echoes)), b"")
        return first == CUT and bool(chunk.choices) and (bool(self.prompt.sent) or _of_chat(chunk))

    def _take_long(self, data: bytes) -> bytes:
        """What was cut out stood elsewhere: read it all."""
        self.prompt.leave()
        return self.take(data)

    @property
    def refusal(self) -> int:
        """The HTTP status of a refusal that is all there is of the reply, 0 if it is none: vLLM finds some faults only after its 200."""
        if not self.error or self.choices:
            return 0
        try:
            code = msgspec.json.decode(self.error, type=_Error).code
        except ValueError:
            return 0
        return code if 400 <= code < 500 else 0  # noqa: PLR2004 - the client's fault

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: the reply is whole, whatever else the stream still brings."""
        return len(self.choices) >= self.expected and all(c.finish_reason for c in self.choices.values())

    @property
    def begun(self) -> bool:
        """Whether anything was sampled, or said, or finished: more than who is speaking."""
        return any(c.ids or c.content or c.reasoning or c.calls or c.finish_reason for c in self.choices.values())

    @property
    def aborted(self) -> bool:
        """Whether the engine ended all of it by itself: `/pause?mode=abort` and `/abort_requests` (vLLM), weight updates."""
        return self.finished and all(choice.finish_reason == "abort" for choice in self.choices.values())


def _of_chat(chunk: _Chunk) -> bool:
    return all(choice.text is None for choice in chunk.choices)


def _metadata(raw: bytes) -> weights.Metadata | None:
    if b"weight_version" not in raw:
        return None
    try:
        return _METADATA.decode(raw)
    except (ValueError, RecursionError):
        return None
