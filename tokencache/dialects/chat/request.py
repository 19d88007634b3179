"""Parses a chat completions request and keeps its members as the client wrote them.

Members stay raw JSON, and members that the proxy does not know reach the engine unchanged. The proxy writes only those that it adds or
replaces, and those whose odd spelling another reader might read differently (`scalars`).
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any, overload

import msgspec

from tokencache.core.agents import AgentLabel
from tokencache.core.chain import Conversation, before_last, build_conversation, extend
from tokencache.core.media import MediaPart
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.rules import Leniency
from tokencache.core.session import History
from tokencache.dialects import gym, gym_request
from tokencache.dialects.chat.incremental import IncrementalParser, ParsedHistory, SplitBody, split_whole
from tokencache.dialects.chat.rendering import NOTHING, RenderArgs, render_args, scope_of
from tokencache.dialects.chat.scalars import normalize
from tokencache.dialects.chat.vocabulary import ReadMessage, pin, resolve_model, with_stand_ins
from tokencache.dialects.json_io import entries_of, fields_of, member, read_members, refuse_repeated, value_of
from tokencache.dialects.members import ALTERING_PROMPT, READ_INSIDE
from tokencache.errors import HarnessError
from tokencache.pauses import LARGE, parts_of, pause

Raw = msgspec.Raw

_EXTRAS = ("kv_transfer_params", "vllm_xargs", "nvext")
_EXACT_PROMPTS = ("prompt_token_ids", "tokencache_prompt", "tokencache_prefix", gym.PREFIX, "token_data", "use_raw_prompt")
"""Members of `_EXTRAS` that replace the prompt: vLLM's, those of the plugin for images and for prefixes by hash, its prefix, Dynamo's."""
_ASKED: Mapping[str, tuple[tuple[type, ...], Any]] = {
    "stream": ((bool,), False),
    "n": ((int,), 1),
    "return_token_ids": ((bool,), False),
    "logprobs": ((bool,), False),
    "include_reasoning": ((bool,), True),
}
"""Members that say which reply the client gets: their types and defaults."""
_LINKED = 256
"""Messages whose chain is computed between two pauses."""


class LastMessages(Sequence[bytes]):
    """The raw messages of a request without those before `first`, which were released. Their places stay as they were."""

    __slots__ = ("_first", "_kept")

    def __init__(self, first: int, kept: Sequence[bytes]) -> None:
        self._first, self._kept = first, kept

    def __len__(self) -> int:
        return self._first + len(self._kept)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        places = range(-self._first, len(self._kept))[index]
        if isinstance(places, int):
            if places >= 0:
                return self._kept[places]
        elif not places or min(places) >= 0:
            return [*map(self._kept.__getitem__, places)]
        raise LookupError("this message was released")  # an `IndexError` would end a loop as if there were no more messages


class ChatCall(msgspec.Struct):
    """A chat completions request.

    Attributes:
        fields: the members of the body, raw.
        raw_messages: the items of `messages`, raw.
        conversation: the history in canonical form; `None` if it could not be parsed.
        media: index of a message → its parts that are not text.
        malformed: indexes of messages with tool-call arguments that an engine may refuse.
        plain: why this call is not matched (`core.reasons`), or `""`.
        shows_ids, shows_logprobs, shows_reasoning: whether the client gets ids, log probabilities and reasoning.
        dialect: name of the client's dialect.
        handle: the handle in its reply, which the client echoes; `""` if the dialect has no field for it.
        handles: index of an assistant message → the handle that the client sent back with it.
        echoes: index of a message → the token ids that the client sent back with it (`gym`). If the history was parsed incrementally,
            only its new messages are included.
        required_prefix: packed ids with which the client requires the prompt to begin (`gym.PREFIX`); empty if it requires none.
        left_out: rules by which the dialect left parts of the request out.
        pinned: names of the sampling parameters that `pin` set.
        replaced: the client's values of those that had another value.
        harness: name of the adapter that applies in this session, `""` if none.
        agent: how the harness names the agent that makes the call, as a label (`core.agents`); `None` if it does not.
        leniency: the rules of that adapter.
        continues: whether the reply continues the last message, which is the assistant's and has only text.
        history: whether earlier replies keep their thinking (`supply`), or only what the template shows of them (`follow`).
        released: the number of messages at the beginning that `release` has released.
    """

    fields: dict[str, Raw]
    raw_messages: Sequence[bytes]
    conversation: Conversation | None
    args: RenderArgs
    model: str
    stream: bool
    n: int
    shows_ids: bool
    shows_logprobs: bool
    shows_reasoning: bool
    media: Mapping[int, tuple[MediaPart, ...]] = NOTHING
    malformed: tuple[int, ...] = ()
    plain: str = ""
    dialect: str = "chat"
    handle: str = ""
    handles: Mapping[int, str] = NOTHING
    echoes: Mapping[int, gym.ReturnedIdFragments] = NOTHING
    required_prefix: bytes = b""
    left_out: tuple[str, ...] = ()
    pinned: AbstractSet[str] = frozenset()
    replaced: Mapping[str, Any] = {}
    harness: str = ""
    agent: AgentLabel | None = None
    continues: bool = False
    leniency: Leniency = Leniency()
    history: History = "supply"
    released: int = 0

    def pin(self, policy: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set the sampling parameters of a policy, except for those that are pinned already. Returns the values that they replaced."""
        new = {name: value for name, value in policy.items() if name not in self.pinned}
        replaced = pin(self.fields, new)
        self.pinned, self.replaced = self.pinned | new.keys(), {**self.replaced, **replaced}
        return replaced

    def release(self, until: int) -> int:
        """Release the body and the messages before `until`: the request can be recorded, but not sent again.

        Returns:
            The size of the messages and other members that are left, in bytes.
        """
        kept = self.raw_messages[until:]
        self.raw_messages, self.released = LastMessages(until, kept), until
        self.fields = {name: value.copy() for name, value in self.fields.items() if name != "messages"}  # otherwise each may keep the body
        return sum(map(len, kept)) + sum(map(len, self.fields.values()))

    @property
    def has_stop_strings(self) -> bool:
        """Whether the request has stop strings."""
        return bool(value_of(self.fields["stop"])) if "stop" in self.fields else False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of its conversation; empty if it could not be parsed."""
        return self.conversation.messages if self.conversation is not None else ()

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The chain of its conversation; empty if it could not be parsed."""
        return self.conversation.chain if self.conversation is not None else ()

    @property
    def answers(self) -> Conversation | None:
        """The history that the whole reply answers: without its beginning, if the request continues it; `None` if unparsed."""
        return before_last(self.conversation) if self.continues and self.conversation is not None else self.conversation

    @property
    def reply_handle(self) -> str:
        """The handle that the client will have with the whole reply: that of its beginning, if the request continues it."""
        begun = self.handles.get(len(self.raw_messages) - 1, "") if self.continues else ""
        return begun or self.handle

    @property
    def answered_messages(self) -> int:
        """The number of messages that the whole reply answers."""
        return len(self.raw_messages) - self.continues

    @property
    def call_count(self) -> int:
        """The number of tool calls in its messages; 0 if they could not be parsed."""
        return self.conversation.call_count if self.conversation is not None else 0

    def media_parts(self, until: int | None = None) -> list[MediaPart]:
        """The parts of the messages (of those before `until`) that are not text, in order."""
        return [part for index, parts in self.media.items() if until is None or index < until for part in parts]

    @property
    def tool_count(self) -> int:
        """The number of tools in the request."""
        return len(entries_of(self.args.tools)) if self.args.tools is not None else 0

    def safe_messages(self) -> Sequence[bytes]:
        """The raw messages, with stand-ins for tool-call arguments that an engine may refuse."""
        if not self.malformed:
            return self.raw_messages
        safe = list(self.raw_messages)
        for index in self.malformed:
            safe[index] = with_stand_ins(safe[index])
        return safe

    def safe_fields(self) -> dict[str, Raw]:
        """The members of the request, with `safe_messages`."""
        if not self.malformed:
            return self.fields
        return {**self.fields, "messages": Raw(b"[" + b",".join(self.safe_messages()) + b"]")}

    def as_written(self) -> tuple[RenderArgs, bool]:
        """How the engine renders this call if no ids are supplied: the arguments, and whether a generation prompt follows.

        Unlike `args`, these include `continue_final_message`, with which the reply continues the last message.
        """
        unfinished = {name: self.fields[name] for name in ("continue_final_message",) if name in self.fields}
        args = msgspec.structs.replace(self.args, members={**self.args.members, **unfinished}) if unfinished else self.args
        return args, member(self.fields, "add_generation_prompt", (bool,), True)


async def read_chat(
    body: bytes,
    parser: IncrementalParser,
    session: str = "",
    *,
    served: Callable[[str], str] = str,
    rewrite: gym_request.Rewrite | None = None,
) -> ChatCall:
    """Parse a request body, incrementally if `parser` remembers a body under `session`.

    Args:
        body: the request's JSON.
        parser: remembers parsed bodies.
        session: the name under which this body is remembered; `""` remembers nothing.
        served: maps the client's model name to a served model.
        rewrite: changes the members, and with them the messages, as NeMo Gym's model server does; `None` leaves them unchanged.

    Raises:
        HarnessError: the body is not a JSON object, a member has the wrong type or an unclear value (`scalars`), or it has token ids of
            its own.
    """
    if rewrite is not None:
        body = gym_request.with_audio(body)
    secret = parser.secret
    split, echoes = _without_echoes(parser.split(session, body) or await split_whole(body), body)
    if split.before is None and len(body) > LARGE:
        await pause()
    if split.before is not None and split.before.known.rewritten and not echoes and gym.carries(body):  # the ids may be on known messages
        split, echoes = _without_echoes(await split_whole(body), body)
    if rewrite is not None:
        split = _as_gym_sends(split)
    fields, raw_messages = rewrite(split.fields) if rewrite is not None else dict(split.fields), split.entries
    required_prefix = gym.take_prefix(fields)
    if split.rewritten:
        fields["messages"] = Raw(b"[" + b",".join(raw_messages) + b"]")
    tools = fields.get("tools")
    if tools is not None and bytes(tools)[:1] not in {b"[", b"n"}:
        raise HarnessError("'tools' must be a list", param="tools")
    refuse_prompts(fields)
    normalize(fields)
    model = resolve_model(fields, served)
    args, asked = render_args(fields, tools), read_members(fields, _ASKED)
    call = ChatCall(
        fields=fields,
        raw_messages=raw_messages,
        conversation=None,
        args=args,
        model=model,
        stream=asked["stream"],
        n=asked["n"],
        shows_ids=asked["return_token_ids"],
        shows_logprobs=asked["logprobs"],
        shows_reasoning=asked["include_reasoning"],
        echoes=echoes or NOTHING,
        required_prefix=required_prefix,
    )
    known = split.before.known if split.before is not None else None
    model_name = call.model.encode("utf-8", "surrogatepass")
    try:
        scope = scope_of(call.model, call.fields) + model_name + b"\0" + call.args.template
        new = await _read_new(parser, split.new)
    except (ValueError, RecursionError):  # an unknown kind of message, JSON that msgspec refuses, invalid UTF-8, or nested too deeply
        call.plain = Reason.UNREADABLE_HISTORY
        return call
    call.conversation = await _chained(scope, new, known, model=model_name, secret=secret)
    call.media, call.malformed = _noted(new, split.old, known)
    shaped = not call.conversation.messages or not ALTERING_PROMPT.isdisjoint(fields)
    call.continues = shaped and _continues(call)
    call.plain = _plain_reason(call) if shaped else ""
    history = ParsedHistory(scope, call.conversation, call.media, call.malformed, split.rewritten)
    parser.remember(session, body, split, history, secret)
    return call


def _noted(
    new: Sequence[ReadMessage], old: int, known: ParsedHistory | None
) -> tuple[Mapping[int, tuple[MediaPart, ...]], tuple[int, ...]]:
    """Return `media` and `malformed` of a call (`ChatCall`) whose `new` messages begin at the index `old`, after those that are `known`."""
    media, malformed = (dict(known.media), [*known.malformed]) if known is not None else ({}, [])
    for index, read in enumerate(new, old):
        if read.media:
            media[index] = read.media
        if read.malformed:
            malformed.append(index)
    return media or NOTHING, tuple(malformed)


async def _chained(scope: bytes, new: Sequence[ReadMessage], known: ParsedHistory | None, *, model: bytes, secret: bytes) -> Conversation:
    """Add new messages to the known ones of a conversation, if it has the same prompt context; otherwise build it."""
    messages, digests, exacts = [*map(attrgetter("message"), new)], [*map(attrgetter("digest"), new)], [*map(attrgetter("exact"), new)]
    if known is not None and known.scope == scope:
        conversation, start = known.conversation, 0
    else:
        if known is not None:
            before = known.conversation
            messages, digests, exacts = [*before.messages, *messages], [*before.digests, *digests], [*before.exacts, *exacts]
        start = _LINKED
        conversation = build_conversation(scope, messages[:start], digests[:start], exacts[:start], model=model, secret=secret)
    for at in range(start, len(messages), _LINKED):
        if at:
            await pause()
        until = at + _LINKED
        conversation = extend(conversation, messages[at:until], digests[at:until], exacts[at:until])
    return conversation


async def _read_new(parser: IncrementalParser, entries: Sequence[bytes]) -> list[ReadMessage]:
    """Parse messages; raises the errors of `MessageReader.read`."""
    new: list[ReadMessage] = []
    parts = parts_of(entries)
    for part in parts:
        new += parser.messages.read(part)
        if part is not parts[-1]:
            await pause()
    return new


def refuse_prompts(fields: dict[str, Raw]) -> None:
    """Check that a request does not supply ids of its own, and that the engine reads each member that is read here in the same way.

    Raises:
        HarnessError: it has ids, or gives a member twice.
    """
    for name in READ_INSIDE:
        if name in fields:
            refuse_repeated(bytes(fields[name]))
    for extras in _EXTRAS:
        if extras not in fields:
            continue
        given = member(fields, extras, (dict,), {})
        if (prompt := next((name for name in _EXACT_PROMPTS if given.get(name) is not None), None)) is not None:
            place = f"{extras}.{prompt}"
            raise HarnessError(f"{place!r} cannot be set within a session: the proxy supplies the exact ids", param=place)


def _without_echoes(split: SplitBody, body: bytes) -> tuple[SplitBody, dict[int, gym.ReturnedIdFragments]]:
    """Remove the token ids that the client sent back on messages."""
    if split.before is None and split.spans and not gym.may_carry(body):
        return split, {}  # nearly always, and all messages are in the body as they are
    new, echoes = gym.take_all(split.new, split.old)
    return (split if new is split.new else split.rewrite(new)), echoes


def _as_gym_sends(split: SplitBody) -> SplitBody:
    """Rewrite the new messages as NeMo Gym's model server sends them to vLLM."""
    sent = [gym_request.with_reasoning(entry) for entry in split.new]
    return split if sent == split.new else split.rewrite(sent)


def with_messages(call: ChatCall, messages: list[bytes]) -> bytes:
    """Write a request's body with other messages (raw) instead of its own."""
    return msgspec.json.encode({**call.fields, "messages": Raw(b"[" + b",".join(messages) + b"]")})


async def read_tokenize(
    body: bytes, parser: IncrementalParser, *, served: Callable[[str], str] = str, rewrite: gym_request.Rewrite | None = None
) -> ChatCall | None:
    """Parse a `/tokenize` body with messages as the equivalent chat call; `None` for a body with a prompt. Arguments: see `read_chat`.

    With both, vLLM 0.32 takes the one that has fewer errors, so only the engine can answer.
    """
    fields = fields_of(body)
    return await read_chat(body, parser, served=served, rewrite=rewrite) if "messages" in fields and "prompt" not in fields else None


def _continues(call: ChatCall) -> bool:
    """Whether the reply continues the text of the last message. vLLM refuses that together with a generation prompt."""
    fields, last = call.fields, call.messages[-1] if call.messages else None
    wanted = member(fields, "continue_final_message", (bool,), False) and not member(fields, "add_generation_prompt", (bool,), True)
    return wanted and last is not None and last.role == "assistant" and bool(last.text) and not (last.calls or last.media)


def _plain_reason(call: ChatCall) -> str:
    """Return why the engine cannot use supplied ids, or why the prompt is not a chat turn; `""` for an ordinary call."""
    fields = call.fields
    found = {
        Reason.NO_MESSAGES: not call.raw_messages,
        Reason.CONTINUE_FINAL_MESSAGE: member(fields, "continue_final_message", (bool,), False) and not call.continues,
        Reason.NO_GENERATION_PROMPT: not (member(fields, "add_generation_prompt", (bool,), True) or call.continues),
        Reason.ECHO: member(fields, "echo", (bool,), False),
        Reason.TRUNCATED_PROMPT: member(fields, "truncate_prompt_tokens", (int,), -1) != -1,
    }
    return next((reason for reason, present in found.items() if present), "")
