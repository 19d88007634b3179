"""Collects an engine's reply, chunk by chunk from a stream or from a whole body.

Text and token ids do not line up within a chunk of vLLM's stream (incomplete UTF-8, parsers that hold text back). So they are collected
separately: the ids as the engine reports them, the message as the harness receives it. An engine may also report:

*Routed experts.* A mixture-of-experts engine with `--enable-return-routed-experts` reports with every whole reply to which experts each
token was routed: `choices[].routed_experts`, a `.npy` file in base64 (vLLM 0.32, `chat_completion/protocol.py`; text completions too;
streamed replies have none). That is 384 bytes per token for Qwen3-30B-A3B, and 100 MiB per turn for the largest models. So it is cut out of
the bytes before the JSON is parsed (`prompt_echo`).

*Weight versions.* If weights are updated while an engine serves, it may sample one reply with several versions. The first of these reports
counts:

1. spans of a choice, `choices[].weight_versions: [{"version", "start", "end"}]` over its tokens: vLLM 0.33 and later, requested with
   `return_weight_versions` (vLLM, `docs/training/weight_transfer/`; 0.32 ignores the request)
2. spans or one version of the reply, `metadata.weight_versions` and `metadata.weight_version`: SGLang, whole replies only, of the first
   choice (`sglang/srt/utils/weight_versions.py`); `sglext` instead of `metadata` in some releases (sglang PR 40347)
3. the header `X-Weight-Version`: no known engine sends it. Your own worker or router can set it (NeMo RL's worker does not report the
   version).

A single version for a whole reply cannot show a change in the middle of the reply. It counts if nothing else shows one.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tokencache.core.ids import ABOVE_ALL_IDS, ID_BYTES, as_array, unpack_logprobs
from tokencache.core.messages import Message, ToolCall
from tokencache.dialects.completion_reader import ReplyMessage
from tokencache.dialects.json_io import NULL
from tokencache.engine.prompt_echo import FIRST_MARK, PromptEcho, cut_out, mark_number

if TYPE_CHECKING:
    from tokencache.core.media import Places

Raw = msgspec.Raw

WEIGHT_VERSION_HEADER = "X-Weight-Version"
_LOGPROBS_NAME = b'"logprobs":'
_LOGPROBS_BEGIN = _LOGPROBS_NAME + b'{"content":['
_LOGPROBS_END = b'"top_logprobs":[]}]}'
_EXPERTS = b'"routed_experts":"'
_NO_PROMPT = NULL, FIRST_MARK
"""What a choice has in place of the ids of its own prompt."""
STEP = 4
"""Numbers that each step has in `Choice.steps`."""
_MOST_PIECES, _PIECE = 8, 256
"""Pieces of a text before they are joined; in a long text, one for so many characters that were joined before, so that the cost stays
linear. A Python string takes 50 bytes more than its text, and a token has four letters."""
NO_ID = -1
"""Stands in `Choice.ids` for an id that does not fit in an int32. No vocabulary has it, so `figures` refuses the reply."""
AT_ONCE = 8
"""Number of choices in `Reply.later` that are parsed together. More would save little, and they wait in memory."""


class TokenLogprob(msgspec.Struct, gc=False):
    """The log probability of one sampled token (natural logarithm); `None` if it is not a number. All other members are ignored."""

    logprob: float | None = None


_LOGPROB = attrgetter("logprob")


class Logprobs(msgspec.Struct):
    """Log probabilities of a chat (`content`) or of a text completion (`token_logprobs`)."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[float | None] | None = None


class _Packed(msgspec.Struct):
    """Ids and log probabilities as the plugin packs them (`tokencache_vllm.packed_replies`), for `core.ids`."""

    ids: bytes
    logprobs: bytes = b""

    def __post_init__(self) -> None:
        size = {b"": 1, b"f": 4, b"d": 8}.get(self.logprobs[:1], 0)
        if len(self.ids) % ID_BYTES or not size or len(self.logprobs[1:]) % size:
            raise ValueError("packed ids or log probabilities are incomplete")


class _PackedPrompt(msgspec.Struct):
    """The ids of the prompt as the plugin packs them."""

    prompt: bytes

    def __post_init__(self) -> None:
        if len(self.prompt) % ID_BYTES:
            raise ValueError("packed ids are incomplete")


class _Choice(msgspec.Struct):
    index: int = 0
    delta: ReplyMessage | None = None
    message: ReplyMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = NULL
    logprobs: Logprobs | Literal["=0"] | None = None  # `FIRST_MARK`
    weight_versions: list[Any] | None = None
    routed_experts: Raw = NULL
    tokencache: _Packed | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: Raw = NULL
    model: str = ""
    error: Raw = NULL
    metadata: Raw = NULL
    sglext: Raw = NULL
    tokencache: _PackedPrompt | None = None
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    code: int = HTTPStatus.INTERNAL_SERVER_ERROR


class _PlainChoice(msgspec.Struct):
    """A choice of a plain chunk, which `hide_tokens` recognizes. Parsing it as a `_Choice` takes twice as long (1.9 µs, not 0.9)."""

    delta: ReplyMessage
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    index: int = 0
    tokencache: _Packed | None = None


class _WeightMetadata(msgspec.Struct):
    """SGLang's report of a reply's weight versions."""

    weight_version: Any = None
    weight_versions: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_PLAIN = msgspec.json.Decoder(list[_PlainChoice])
_LOGPROBS = msgspec.json.Decoder(Logprobs)
_METADATA = msgspec.json.Decoder(_WeightMetadata)


class CallPieces:
    """A tool call as it arrives: the pieces of its name and arguments, which are joined once."""

    __slots__ = ("arguments", "id", "names")

    def __init__(self) -> None:
        self.id = ""
        self.names: list[str] = []
        self.arguments: list[str] = []

    def whole(self) -> ToolCall:
        """Return the call as far as it has arrived."""
        return ToolCall(self.id, "".join(self.names), "".join(self.arguments))


class Choice(msgspec.Struct, eq=False):
    """One choice of a reply: sampled ids, their log probabilities, and the message.

    Attributes:
        content, reasoning: the text in pieces. That of the last delta is one of them.
        steps: `STEP` numbers for each delta with text: of ids before and after it, of characters of content and reasoning that it added.
        call_steps: for each call: the numbers of ids before and after the delta with which it began.
        experts: routed experts, as the engine reported them (base64 or JSON); `b""` if none.
        prompt: the raw JSON list of its own prompt's ids, if the engine reports them with each choice (text completions).
        counted: the last number of tokens that the engine counted in an event of this choice; `None` if it did not.
        certain: number of ids before the first that is in doubt; `None` if none is. `doubt` is why, in words; `""` after an event that
            cannot be read.
        aligned: whether each event had as many log probabilities as ids.
    """

    ids: "array[int]" = msgspec.field(default_factory=partial(array, "i"))
    logprobs: "array[float]" = msgspec.field(default_factory=partial(array, "d"))  # type: ignore[arg-type]  # mypy takes it for an array of ints
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, CallPieces] = {}
    steps: "array[int]" = msgspec.field(default_factory=partial(array, "I"))
    call_steps: list[tuple[int, int]] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    versions: Sequence[Any] = ()
    experts: bytes = b""
    prompt: bytes = b""
    counted: int | None = None
    certain: int | None = None
    doubt: str = ""
    aligned: bool = True
    _before: int = 0  # ids of the requests before the last one
    _grown: list[list[str]] = []  # the arguments to which the last messages added

    @property
    def sampled(self) -> int:
        """The number of ids that the last request sampled."""
        return len(self.ids) - self._before

    @property
    def has_words(self) -> bool:
        """Whether it has text, reasoning or calls."""
        return bool(self.content or self.reasoning or self.calls)

    @property
    def ended_by_a_token(self) -> bool:
        """Whether it has a finish reason, and the engine did not end it by itself."""
        return self.finish_reason not in {None, "abort", "error"}

    def doubt_after(self, certain: int, why: str = "") -> None:
        """Note that only the first `certain` ids are certain; `why` is empty if the reply has another sign of it."""
        if self.certain is None or certain < self.certain:
            self.certain, self.doubt = certain, why or self.doubt

    def keep(self, tokens: int, *, logprobs: bool) -> None:
        """Drop all but the first ids, and the log probabilities of the others, or of all."""
        self.logprobs = self.logprobs[:tokens] if logprobs else array("d")
        self.ids = self.ids[:tokens]

    def reopen(self) -> None:
        """Take back its end, because another request continues it."""
        self.finish_reason = self.stop_reason = self.counted = None
        self.versions = ()
        self._before = len(self.ids)

    def message(self, *, with_reasoning: bool) -> Message:
        """Return the message as the harness received it."""
        return Message(
            "assistant",
            content="".join(self.content) or None,
            reasoning=("".join(self.reasoning) or None) if with_reasoning else None,
            calls=tuple([self.calls[i].whole() for i in sorted(self.calls)]) if self.calls else (),
        )

    def replace_message(self, message: ReplyMessage) -> None:
        """Set the message in place of what was collected."""
        self.content, self.reasoning, self.calls, self.call_steps = [], [], {}, []
        self.add_messages([message], [(0, len(self.ids))])

    def add(self, choice: _Choice, experts: Sequence[bytes], counted: int | None) -> None:
        """Add the part of this choice in one chunk, or in a whole body.

        Args:
            choice: the part.
            experts: the values that were cut out.
            counted: the number of tokens that the engine counts so far; `None` if it does not.
        """
        before = len(self.ids)
        self.add_parts([choice], [choice.delta or choice.message or ReplyMessage(content=choice.text)])
        if not self.prompt and choice.prompt_token_ids not in _NO_PROMPT:
            self.prompt = bytes(choice.prompt_token_ids)
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
        self.versions = choice.weight_versions or self.versions
        if choice.routed_experts != NULL:
            found = bytes(choice.routed_experts)
            number = mark_number(found)
            self.experts = (experts[number] if 0 <= number < len(experts) else found) or self.experts
        if counted is not None:
            self.counted = counted
            if counted != self.sampled:
                self.doubt_after(before, f"the engine counts {counted} tokens, and reported {self.sampled} ids")

    def add_parts(self, parts: Sequence[_Choice | _PlainChoice], messages: Iterable[ReplyMessage]) -> None:
        """Add parts of this choice: ids and log probabilities, packed or as vLLM writes them, and the message of each."""
        spans: list[tuple[int, int]] = []
        for choice in parts:
            ids, logprobs = len(self.ids), len(self.logprobs)
            if choice.tokencache is not None:
                self.ids += as_array(choice.tokencache.ids)
                self.logprobs.fromlist(unpack_logprobs(choice.tokencache.logprobs))
            else:
                tokens = choice.token_ids or []
                try:
                    self.ids.fromlist(tokens)
                except OverflowError:
                    self.ids.fromlist([token if 0 <= token < ABOVE_ALL_IDS else NO_ID for token in tokens])
                if isinstance(choice.logprobs, Logprobs):
                    if choice.logprobs.content:
                        values = [*map(_LOGPROB, choice.logprobs.content)]
                        self.logprobs.fromlist(values if None not in values else [value for value in values if value is not None])
                    if choice.logprobs.token_logprobs:
                        self.logprobs.fromlist([value for value in choice.logprobs.token_logprobs if value is not None])
            more = len(self.ids) - ids
            if more and self.finish_reason:
                self.doubt_after(self._before, "ids arrived after the finish reason")
            if len(self.logprobs) - logprobs != more:
                self.aligned = False
            spans.append((ids, ids + more))
        self.add_messages(messages, spans)

    def add_messages(self, messages: Iterable[ReplyMessage], spans: Iterable[tuple[int, int]]) -> None:
        """Add a message, or deltas; `spans` are the numbers of ids before and after each."""
        for pieces in (self.content, self.reasoning, *self._grown):
            if len(pieces) > _MOST_PIECES and len(pieces) > len(pieces[0]) // _PIECE:
                pieces[:] = ["".join(pieces)]
        self._grown.clear()
        for message, span in zip(messages, spans, strict=True):
            content, thought = message.content, message.reasoning or message.reasoning_content
            if content:
                self.content.append(content)
            if thought:
                self.reasoning.append(thought)
            if content or thought:
                self.steps.fromlist([*span, len(content or ""), len(thought or "")])
            if message.tool_calls:
                for index, call in message.calls():
                    if index not in self.calls:
                        self.call_steps.append(span)
                    known = self.calls.setdefault(index, CallPieces())
                    known.id = call.id or known.id
                    known.names.append(call.name)
                    known.arguments.append(call.arguments)
                    self._grown.append(known.arguments)

    def take_back(self, message: ReplyMessage) -> None:
        """Remove the delta that was added last."""
        content, thought = message.content, message.reasoning or message.reasoning_content
        if content:
            self.content.pop()
        if thought:
            self.reasoning.pop()
        if content or thought:
            del self.steps[-STEP:]
        for index, call in reversed([*message.calls()]):  # one delta may have several parts of a call
            pieces = self.calls[index]
            pieces.names.pop()
            pieces.arguments.pop()
            if call.id and not (any(pieces.names) or any(pieces.arguments)):
                del self.calls[index]
                self.call_steps.pop()


class Reply(msgspec.Struct, eq=False):
    """All choices of one call, as they arrive.

    Attributes:
        expected: the number of choices that were requested.
        prompt: the engine's report of the prompt's ids; the caller sets its `sent` to the ids that were sent.
        model: the model's name in the reply.
        error: the raw JSON of an error that the engine reported within its reply; `b""` if none.
        unreadable: the number of chunks that could not be parsed.
        counted: the number of tokens of all choices that the engine counts for the last request; `None` if it has not counted them.
        prompt_counted: the same for the prompt.
        vocabulary: the number of ids that the model has, 0 if unknown; set by the caller.
        must_count: whether the engine counts the tokens of all its replies; set by the caller.
        count_proves: whether its count of the prompt's tokens proves that it used the ids that were sent; set by the caller.
        version: the weight version in the reply's header, `""` if there is none.
        places: the placeholders of media in the prompt, as the engine reports them; `None` if it reports none. Set by the caller.
        later: the JSON of the choices of plain chunks (`dialects.completion_reader`), which is parsed when `choices` is read next. The
            caller adds them, and calls `read_later` when there are `AT_ONCE`.
    """

    expected: int = 1
    prompt: PromptEcho = msgspec.field(default_factory=PromptEcho)
    model: str = ""
    error: bytes = b""
    unreadable: int = 0
    counted: int | None = None
    prompt_counted: int | None = None
    vocabulary: int = 0
    must_count: bool = False
    count_proves: bool = False
    version: str = ""
    places: "Places | None" = None
    later: list[bytes] = []
    _continued: bool = False
    _choices: dict[int, Choice] = {}
    _metadata: _WeightMetadata | None = None
    _experts: tuple[bytes, ...] = ()

    @property
    def choices(self) -> dict[int, Choice]:
        """The choices by their index, as far as they have arrived."""
        if self.later:
            self.read_later()
        return self._choices

    def read_later(self) -> None:
        """Parse what is in `later`."""
        later, self.later = self.later, []
        try:
            choices = _PLAIN.decode(b"[%s]" % b",".join(later))
        except (ValueError, RecursionError):  # one of them is not JSON: find out which
            for data in later:
                self.add(b'{"choices":[%s]}' % data)
            return
        parts: dict[int, list[_PlainChoice]] = {}
        for part in choices:
            parts.setdefault(part.index, []).append(part)
        for index, own in parts.items():
            self._choice(index).add_parts(own, map(attrgetter("delta"), own))

    def _choice(self, index: int) -> Choice:
        found = self._choices.get(index)
        if found is None:
            found = self._choices[index] = Choice()
            if self.unreadable:
                found.doubt_after(0)
        return found

    def without_experts(self, data: bytes) -> bytes:
        """Cut routed experts out of the JSON of a chunk or a whole body; call this before `add`."""
        start, end = self.prompt.find(data)
        if data.find(_EXPERTS, 0, start) < 0 and data.find(_EXPERTS, end) < 0:
            return data  # the hundreds of kilobytes of ids in between need not be searched
        spans = _expert_spans(data)
        if not spans:
            return data
        self._experts = tuple([data[start + 1 : end - 1] for start, end in spans])  # of this chunk alone
        return cut_out(data, spans)

    def add(self, data: bytes, *, hide_logprobs: bool = False) -> bytes:
        """Add the JSON of a chunk, or of a whole body.

        With `hide_logprobs`, the log probabilities may be cut out, because only this object needs them.

        Returns:
            The same JSON without the ids of the prompt (`PromptEcho`), and without log probabilities that were cut out.
        """
        if self.later:
            self.read_later()
        known = self.prompt.known
        brief = short = data if known else self.prompt.cut(data)
        logprobs = None
        if hide_logprobs and self.expected == 1:
            brief, logprobs = _without_logprobs(short)
        try:
            chunk = _CHUNK.decode(brief)
        except (ValueError, RecursionError):
            self._note_unreadable()
            return data
        of_chat = brief is not data and {*map(attrgetter("text"), chunk.choices)} <= {None}
        if logprobs is not None and not (of_chat and _LOGPROBS_MARK in map(attrgetter("logprobs"), chunk.choices)):
            return self.add(data)  # the text that was cut out belongs to another member
        if not known and not self._note_prompt(chunk, cut=short is not data, of_chat=of_chat):
            self.prompt.stop_cutting()
            return self.add(data)
        usage, alone = chunk.usage, len(chunk.choices) == 1
        self.model = chunk.model or self.model
        self.error = self.error or (bytes(chunk.error) if chunk.error != NULL else b"")
        for choice in chunk.choices:
            if choice.logprobs == _LOGPROBS_MARK:
                choice.logprobs = logprobs
            counted = usage.completion_tokens if usage is not None and alone else None
            self._choice(choice.index).add(choice, self._experts, counted)
        if usage is not None:
            self._note_usage(usage, alone=alone)
        if b"weight_version" in brief:
            self._metadata = self._metadata or _weight_metadata(chunk.metadata) or _weight_metadata(chunk.sglext)
        return brief

    def _note_usage(self, usage: _Usage, *, alone: bool) -> None:
        """Note the usage of a chunk; `alone` is whether the chunk has one choice."""
        if usage.prompt_tokens is not None and not (alone and self.expected > 1) and not self._continued:
            self.prompt_counted = usage.prompt_tokens  # of this reply's prompt: not of a choice's own, nor of a continuation's
        if usage.completion_tokens is not None and not alone:
            self.counted = usage.completion_tokens

    def _note_unreadable(self) -> None:
        self.unreadable += 1
        for choice in self._choices.values():
            choice.doubt_after(len(choice.ids))

    def add_after_end(self, data: bytes) -> None:
        """Add the figures of a chunk that follows the end of a reply that was broken off; its words are not added."""
        try:
            chunk = _CHUNK.decode(data)
        except (ValueError, RecursionError):
            self._note_unreadable()
            return
        if chunk.usage is not None:
            self._note_usage(chunk.usage, alone=len(chunk.choices) == 1)
        for choice in chunk.choices:
            if choice.token_ids or choice.tokencache is not None:
                self._choice(choice.index).doubt_after(0, "ids arrived after the finish reason")

    def trust_count(self) -> None:
        """Note that the ids were counted elsewhere: in a continued stream, the usage is the proxy's own."""
        self.counted = sum(choice.sampled for choice in self.choices.values())

    def _note_prompt(self, chunk: _Chunk, *, cut: bool, of_chat: bool) -> bool:
        """Note the ids of the prompt in a chunk; false if the text that was `cut` out belongs to another member."""
        echoes = [*filter(NULL.__ne__, (chunk.prompt_token_ids, *map(attrgetter("prompt_token_ids"), chunk.choices)))]
        # Of a text completion, each choice has its own prompt: ids that were not sent may be those of a choice.
        if cut and not (echoes[:1] == [FIRST_MARK] and bool(chunk.choices) and (of_chat or self.prompt.sent)):
            return False
        for echo in echoes:
            self.prompt.note(echo, cut=cut)
        if chunk.tokencache is not None:
            self.prompt.note_packed(chunk.tokencache.prompt)
        return True

    def versions(self, index: int) -> Sequence[Any]:
        """Return the weight versions of a choice: spans over its tokens, half-open, or one without a span; none if none was reported."""
        choice = self.choices[index]
        if choice.versions:
            return choice.versions
        found = self._metadata if index == 0 else None
        if found is not None and isinstance(found.weight_versions, list) and found.weight_versions:
            return found.weight_versions
        version = found.weight_version if found is not None and found.weight_version is not None else self.version
        return [{"version": version}] if version != "" and choice.ids else []

    @property
    def refusal(self) -> int:
        """The HTTP status (4xx) of an error that is the whole reply, otherwise 0: vLLM detects some errors only after it has sent a 200."""
        if not self.error or self.choices:
            return 0
        return self.error_code if HTTPStatus.BAD_REQUEST <= self.error_code < HTTPStatus.INTERNAL_SERVER_ERROR else 0

    @property
    def error_code(self) -> int:
        """The HTTP status of an error that the engine reported within its reply; 500 if it names none."""
        try:
            return msgspec.json.decode(self.error, type=_Error).code
        except ValueError:
            return HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: then the reply is complete, whatever the stream still contains."""
        choices = self.choices
        return len(choices) >= self.expected and all(map(_finish_reason, choices.values()))

    @property
    def cut(self) -> str:
        """How the engine broke the reply off after it had sampled: `abort` or `error`; `""` if it did not (yet)."""
        if not any(choice.ids for choice in self.choices.values()):
            return ""
        if self.aborted:
            return "abort"
        return "error" if self.error and not self.finished else ""

    def take_back_message(self, data: bytes) -> None:
        """Remove the words of the chunk that was added last (the JSON that `add` returned). Its ids and the end of the reply stay."""
        for choice in _CHUNK.decode(data).choices:
            if choice.delta is not None:
                self.choices[choice.index].take_back(choice.delta)

    def give_back_message(self, data: bytes) -> None:
        """Add the words of a chunk again that `take_back_message` removed."""
        for choice in _CHUNK.decode(data).choices:
            if choice.delta is not None:
                known = self.choices[choice.index]
                known.add_messages([choice.delta], [(len(known.ids), len(known.ids))])

    def reopen(self) -> None:
        """Take back the end of a reply that was broken off, because another request continues it."""
        self.error, self.counted, self._continued = b"", None, True
        for choice in self.choices.values():
            choice.reopen()

    @property
    def begun(self) -> bool:
        """Whether a choice has ids, text, calls or a finish reason: more than a role."""
        return any(map(any, map(_SIGNS, self.choices.values())))

    @property
    def aborted(self) -> bool:
        """Whether the engine itself ended all choices: `/pause?mode=abort` and `/abort_requests` (vLLM), weight updates."""
        choices = self.choices
        return len(choices) >= self.expected and {*map(_finish_reason, choices.values())} == {"abort"}


_finish_reason, _SIGNS = attrgetter("finish_reason"), attrgetter("ids", "content", "reasoning", "calls", "finish_reason")
_LOGPROBS_MARK = bytes(FIRST_MARK)[1:-1].decode()


def _without_logprobs(data: bytes) -> tuple[bytes, Logprobs | None]:
    """Cut log probabilities out of the JSON of a reply of one choice, as vLLM (0.27 to 0.32) writes them.

    They are most of the bytes of such a reply, and few harnesses request them. If the text that begins as an object also parses as an
    object to its last byte, it is the complete value.

    Returns:
        The JSON with a mark in their place, and the log probabilities; the same bytes and `None` if they are written otherwise.
    """
    start = data.find(_LOGPROBS_BEGIN) + len(_LOGPROBS_NAME)
    end = data.rfind(_LOGPROBS_END) + len(_LOGPROBS_END)
    if start < len(_LOGPROBS_NAME) or end < start:
        return data, None
    try:
        found = _LOGPROBS.decode(memoryview(data)[start:end])
    except (ValueError, RecursionError):
        return data, None
    return cut_out(data, [(start, end)]), found


def _expert_spans(data: bytes) -> list[tuple[int, int]]:
    """Find the strings of routed experts, with their quotes; empty if a string has no end."""
    spans, at = [], data.find(_EXPERTS)
    while at >= 0:
        start = at + len(_EXPERTS) - 1
        end = data.find(b'"', start + 1) + 1
        if not end:
            return []
        spans.append((start, end))
        at = data.find(_EXPERTS, end)
    return spans


def _weight_metadata(raw: Raw) -> _WeightMetadata | None:
    if b"weight_version" not in bytes(raw):
        return None
    try:
        return _METADATA.decode(raw)
    except (ValueError, RecursionError):
        return None
