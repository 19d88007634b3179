"""Chat completions: the request as the harness wrote it.

Nothing is rebuilt that need not be: the members of the body stay raw JSON, and what we add or replace is put beside
them. Members unknown to us go on to the engine as they came.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tokencache.core.chain import Conversation, build_conversation, extend
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.rules import Leniency
from tokencache.dialects import gym, gym_request
from tokencache.dialects.chat.incremental import IncrementalParser, ParsedHistory, SplitBody, split_whole
from tokencache.dialects.chat.rendering import RenderArgs, render_args, scope_of
from tokencache.dialects.chat.vocabulary import resolve_model, with_stand_ins
from tokencache.dialects.json_io import entries_of, fields_of, member, value_of
from tokencache.errors import HarnessError

Raw = msgspec.Raw

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "ignore_eos",
    "n",
    "tool_choice",
    "parallel_tool_calls",
)
"""Members that are recorded with the turn as its sampling parameters."""


class ChatCall(msgspec.Struct):
    """A chat-completions request.

    Attributes:
        fields: the members of the body, raw.
        raw_messages: the entries of `messages`, raw.
        conversation: the history in canonical form; `None` if it could not be read.
        media: whether an entry has parts that are no text.
        malformed: the places of entries with arguments that an engine may refuse.
        plain: why this call is not to be matched, or `""`.
        shows_ids, shows_logprobs, shows_reasoning: what the harness asked to see.
        dialect: the dialect in which the harness asked.
        handle: what its reply carries for the harness to echo; `""` if the dialect has no place for it.
        handles: places of assistant's messages that came back with a handle, and that handle.
        echoes: places of messages that came back with token ids, and those ids (`gym`); of a history that grew, the new ones, if any.
        required_prefix: the packed ids with which the client requires the prompt to begin (`gym.PREFIX`); none if it requires nothing.
        left_out: rules by which the codec left something of the request out.
        replaced: what the harness had asked for where the session's policy put something else (`sampling.pin`).
        harness: the adapter whose habits are forgiven in this session, `""` if none; `leniency` says what they are.
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
    media: bool = False
    malformed: tuple[int, ...] = ()
    plain: str = ""
    dialect: str = "chat"
    handle: str = ""
    handles: Mapping[int, str] = {}
    echoes: Mapping[int, gym.ReturnedIdFragments] = {}
    required_prefix: bytes = b""
    left_out: tuple[str, ...] = ()
    replaced: Mapping[str, Any] = {}
    harness: str = ""
    leniency: Leniency = Leniency()

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters in the request."""
        return {name: value_of(self.fields[name]) for name in SAMPLING if name in self.fields}

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of its conversation; empty if it could not be read."""
        return self.conversation.messages if self.conversation is not None else ()

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The chain of its conversation; empty if it could not be read."""
        return self.conversation.chain if self.conversation is not None else ()

    @property
    def tool_count(self) -> int:
        """How many tools the request offers."""
        return len(entries_of(self.args.tools)) if self.args.tools is not None else 0

    def safe_messages(self) -> Sequence[bytes]:
        """The raw messages with stand-ins for tool-call arguments that an engine may refuse."""
        if not self.malformed:
            return self.raw_messages
        safe = list(self.raw_messages)
        for place in self.malformed:
            safe[place] = with_stand_ins(safe[place])
        return safe

    def safe_fields(self) -> dict[str, Raw]:
        """The members of the request, with the messages that an engine will take."""
        if not self.malformed:
            return self.fields
        return {**self.fields, "messages": Raw(b"[" + b",".join(self.safe_messages()) + b"]")}

    def as_written(self) -> tuple[RenderArgs, bool]:
        """How the engine renders this call if no ids are supplied: the arguments, and whether a reply is opened behind them.

        Other than in `args`, a last message that is to be continued is left open.
        """
        unfinished = {name: self.fields[name] for name in ("continue_final_message",) if name in self.fields}
        args = msgspec.structs.replace(self.args, members=self.args.members | unfinished) if unfinished else self.args
        return args, member(self.fields, "add_generation_prompt", (bool,), True)


def read_chat(
    body: bytes,
    bodies: IncrementalParser,
    session: str = "",
    *,
    served: Callable[[str], str] = str,
    rewrite: gym_request.Rewrite | None = None,
) -> ChatCall:
    """Read a request body, with the help of what is known of the last one under the name `session`.

    `served` says which model is meant by the name that the harness gives it. `rewrite` changes the members, and with it the messages,
    as NeMo Gym's model server does; `None` leaves them as they are.

    Raises:
        HarnessError: it is no JSON object, a member has the wrong type, or it brings token ids of its own.
    """
    if rewrite is not None:
        body = gym_request.with_audio(body)
    split, echoes = _without_echoes(bodies.split(session, body) or split_whole(body))
    if split.known is not None and not echoes and gym.carries(body):  # those of the last reply stand in what was read before
        split, echoes = _without_echoes(split_whole(body))
    if rewrite is not None:
        split = _as_gym_sends(split)
    fields, raw_messages = rewrite(split.fields) if rewrite is not None else dict(split.fields), split.entries
    required_prefix = gym.take_prefix(fields)
    if split.rewritten:
        fields["messages"] = Raw(b"[" + b",".join(raw_messages) + b"]")
    tools = fields.get("tools")
    if tools is not None and bytes(tools)[:1] not in {b"[", b"n"}:
        raise HarnessError("'tools' must be a list", param="tools")
    transfer = member(fields, "kv_transfer_params", (dict,), {})
    if transfer.get("prompt_token_ids") is not None:
        raise HarnessError(
            "'kv_transfer_params.prompt_token_ids' cannot be set within a session: the proxy supplies the exact ids",
            param="kv_transfer_params.prompt_token_ids",
        )
    model = resolve_model(fields, served)
    call = ChatCall(
        fields=fields,
        raw_messages=raw_messages,
        conversation=None,
        args=render_args(fields, tools),
        model=model,
        stream=member(fields, "stream", (bool,), False),
        n=member(fields, "n", (int,), 1),
        shows_ids=member(fields, "return_token_ids", (bool,), False),
        shows_logprobs=member(fields, "logprobs", (bool,), False),
        shows_reasoning=member(fields, "include_reasoning", (bool,), True),
        echoes=echoes,
        required_prefix=required_prefix,
    )
    known = split.known
    voice = call.model.encode("utf-8", "surrogatepass")
    try:
        scope = scope_of(call.model, call.fields) + voice + b"\0" + call.args.template
        new = [bodies.messages.read(raw) for raw in raw_messages[split.old :]]
    except (ValueError, RecursionError):  # no message that we understand, no JSON that msgspec reads, no UTF-8; too deep
        call.plain = Reason.UNREADABLE_HISTORY
        return call
    messages, digests, exacts = [r.message for r in new], [r.digest for r in new], [r.exact for r in new]
    if known is not None and known.scope == scope:
        call.conversation = extend(known.conversation, messages, digests, exacts)
    else:
        if known is not None:
            told = known.conversation
            messages, digests, exacts = [*told.messages, *messages], [*told.digests, *digests], [*told.exacts, *exacts]
        call.conversation = build_conversation(scope, messages, digests, exacts, voice=voice, secret=bodies.secret)
    call.media = (known is not None and known.media) or any(r.message.media for r in new)
    found = tuple(place for place, r in enumerate(new, split.old) if r.malformed)
    call.malformed = (*known.malformed, *found) if known is not None else found
    call.plain = _plain_reason(call)
    bodies.remember(session, body, split, ParsedHistory(scope, call.conversation, call.media, call.malformed, split.rewritten))
    return call


def _without_echoes(split: SplitBody) -> tuple[SplitBody, dict[int, gym.ReturnedIdFragments]]:
    """Take token ids that came back with the messages out of them."""
    entries, echoes = gym.take_all(split.entries, split.old)
    if entries is split.entries:
        return split, echoes
    return msgspec.structs.replace(split, entries=entries, rewritten=True), echoes


def _as_gym_sends(split: SplitBody) -> SplitBody:
    """Write the new messages as NeMo Gym's model server sends them to vLLM."""
    new = split.entries[split.old :]
    sent = [gym_request.with_reasoning(entry) for entry in new]
    if sent == new:
        return split
    return msgspec.structs.replace(split, entries=[*split.entries[: split.old], *sent], rewritten=True)


def with_messages(call: ChatCall, messages: list[bytes]) -> bytes:
    """Write a request's body with other messages (raw) in the place of its own."""
    return msgspec.json.encode({**call.fields, "messages": Raw(b"[" + b",".join(messages) + b"]")})


def read_tokenize(
    body: bytes, bodies: IncrementalParser, *, served: Callable[[str], str] = str, rewrite: gym_request.Rewrite | None = None
) -> ChatCall | None:
    """Read a `/tokenize` body in its chat form as the chat call that would follow; `None` for its prompt form. `rewrite`: `read_chat`."""
    return read_chat(body, bodies, served=served, rewrite=rewrite) if "messages" in fields_of(body) else None


def _plain_reason(call: ChatCall) -> str:
    """Name what in a request keeps the engine from using supplied ids, or makes the prompt no plain chat turn."""
    fields = call.fields
    found = {
        Reason.MEDIA: call.media,
        Reason.NO_MESSAGES: not call.raw_messages,
        Reason.CONTINUE_FINAL_MESSAGE: member(fields, "continue_final_message", (bool,), False),
        Reason.NO_GENERATION_PROMPT: not member(fields, "add_generation_prompt", (bool,), True),
        Reason.ECHO: member(fields, "echo", (bool,), False),
        Reason.TRUNCATED_PROMPT: member(fields, "truncate_prompt_tokens", (int,), -1) != -1,
    }
    return next((reason for reason, there in found.items() if there), "")
