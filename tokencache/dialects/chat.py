"""Chat completions: the request as the harness wrote it.

Nothing is rebuilt that need not be: the members of the body stay raw JSON, and what we add or replace is put beside
them. Members unknown to us go on to the engine as they came.
"""

import json
from typing import Any

import msgspec
import xxhash

from tokencache.core.canonical import canonical_json
from tokencache.core.chain import Conversation, converse, extend
from tokencache.dialects.chat_messages import ReadMessage, with_stand_ins
from tokencache.dialects.growth import Bodies, Known, Split
from tokencache.errors import HarnessError

Raw = msgspec.Raw

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_NULL = Raw(b"null")

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

_RENDERED_BY_BOTH = ("chat_template", "add_special_tokens", "mm_processor_kwargs")
_RENDERED_BY_CHAT = ("chat_template_kwargs", "reasoning_effort", "documents")
"""Members, beside messages and tools, that change what vLLM 0.32 renders (`chat_completion/protocol.py`, `ChatParams`):
those that `/tokenize` takes too, and those that must be folded into its template arguments."""


class RenderArgs(msgspec.Struct, frozen=True):
    """What besides the messages decides how a prompt is rendered, in the form that `/tokenize` takes.

    `members` are top-level members, `chat` those that only chat completions understand, and `kwargs` the template
    arguments with the latter folded in. `digest` names all of it but the tools' content, `template` the template's arguments
    alone; `tools` is their raw JSON.
    """

    digest: bytes
    template: bytes
    members: dict[str, Raw]
    chat: dict[str, Raw]
    kwargs: dict[str, Any]
    tools: Raw | None = None


class ChatCall(msgspec.Struct):
    """A chat-completions request.

    Attributes:
        fields: the members of the body, raw.
        raw_messages: the entries of `messages`, raw.
        read: the same entries as read; shorter if one could not be read.
        conversation: the history in canonical form; `None` if it could not be read.
        media, malformed: whether an entry has parts that are no text, or arguments that are no JSON object.
        plain: why this call is not to be matched, or `""`.
        shows_ids, shows_logprobs, shows_reasoning: what the harness asked to see.
    """

    fields: dict[str, Raw]
    raw_messages: list[bytes]
    read: list[ReadMessage]
    conversation: Conversation | None
    args: RenderArgs
    model: str
    stream: bool
    n: int
    shows_ids: bool
    shows_logprobs: bool
    shows_reasoning: bool
    media: bool = False
    malformed: bool = False
    plain: str = ""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens the harness asked for; 0 if it did not say."""
        return int(_member(self.fields, "max_completion_tokens", (int,), 0) or _member(self.fields, "max_tokens", (int,), 0))

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters in the request."""
        return {name: _value(self.fields[name]) for name in SAMPLING if name in self.fields}

    @property
    def tool_count(self) -> int:
        """How many tools the request offers."""
        return len(_entries(self.args.tools)) if self.args.tools is not None else 0

    def safe_messages(self) -> list[bytes]:
        """The raw messages with stand-ins for tool-call arguments that an engine may refuse."""
        if not self.malformed:
            return self.raw_messages
        return [with_stand_ins(raw) if seen.malformed else raw for raw, seen in zip(self.raw_messages, self.read, strict=True)]


def read(body: bytes, bodies: Bodies, session: str = "") -> ChatCall:
    """Read a request body, with the help of what is known of its session's last one.

    Raises:
        HarnessError: it is no JSON object, a member has the wrong type, or it brings token ids of its own.
    """
    split = bodies.split(session, body) or _split(body)
    fields, raw_messages = split.fields, split.entries
    tools = fields.get("tools")
    if tools is not None and bytes(tools)[:1] not in {b"[", b"n"}:
        raise HarnessError("'tools' must be a list", param="tools")
    transfer = _member(fields, "kv_transfer_params", (dict,), {})
    if transfer.get("prompt_token_ids") is not None:
        raise HarnessError(
            "'kv_transfer_params.prompt_token_ids' cannot be set within a session: the proxy supplies the exact ids",
            param="kv_transfer_params.prompt_token_ids",
        )
    call = ChatCall(
        fields=fields,
        raw_messages=raw_messages,
        read=[],
        conversation=None,
        args=_render_args(fields, tools),
        model=_member(fields, "model", (str,), ""),
        stream=_member(fields, "stream", (bool,), False),
        n=_member(fields, "n", (int,), 1),
        shows_ids=_member(fields, "return_token_ids", (bool,), False),
        shows_logprobs=_member(fields, "logprobs", (bool,), False),
        shows_reasoning=_member(fields, "include_reasoning", (bool,), True),
    )
    known = split.known
    try:
        new = [bodies.messages.read(raw) for raw in raw_messages[split.old :]]
        scope, voice = _scope(call), call.model.encode("utf-8", "surrogatepass") + b"\0" + call.args.template
        seen = [*known.read, *new] if known is not None else new
        if known is not None and known.scope == scope and known.conversation.voice == voice:
            call.conversation = extend(known.conversation, [r.message for r in new], [r.digest for r in new])
        else:
            call.conversation = converse(scope, [r.message for r in seen], [r.digest for r in seen], voice=voice)
    except (ValueError, RecursionError):  # no message that we understand, no JSON that msgspec reads, no UTF-8; too deep
        call.plain = "unreadable-history"
        return call
    call.read = seen
    call.media = (known is not None and known.media) or any(r.message.media for r in new)
    call.malformed = (known is not None and known.malformed) or any(r.malformed for r in new)
    call.plain = _plain_reason(call)
    bodies.remember(session, body, split, Known(scope, seen, call.conversation, call.media, call.malformed))
    return call


def read_tokenize(body: bytes, bodies: Bodies) -> ChatCall | None:
    """Read a `/tokenize` body in its chat form as the chat call that would follow; `None` for its prompt form."""
    return read(body, bodies) if "messages" in _fields(body) else None


def _split(body: bytes) -> Split:
    fields = _fields(body)
    return Split(fields, _messages(fields))


def _fields(body: bytes) -> dict[str, Raw]:
    try:
        return _FIELDS.decode(body)
    except (ValueError, RecursionError):
        return _lenient_fields(body)


def _lenient_fields(body: bytes) -> dict[str, Raw]:
    """Read what Python's own JSON accepts and strict readers refuse: lone surrogates, NaN."""
    try:
        decoded = json.loads(body)
        if isinstance(decoded, dict):
            return {key.encode().decode(): Raw(json.dumps(value).encode()) for key, value in decoded.items()}
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"the request body is not valid JSON: {why}") from None
    raise HarnessError("the request body must be a JSON object")


def _value(raw: Raw) -> Any:
    """Decode a member for the record; what no JSON can hold (NaN, a lone surrogate) is kept as it was written."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return bytes(raw).decode(errors="replace")


def _decode(raw: Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"{name!r} cannot be read: {why}", param=name) from None


def _member(fields: dict[str, Raw], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    raw = fields.get(name)
    if raw is None:
        return default
    value = _decode(raw, name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise HarnessError(f"{name!r} must be of type {wanted}, not {type(value).__name__}", param=name)
    return value


def _messages(fields: dict[str, Raw]) -> list[bytes]:
    raw = fields.get("messages")
    if raw is None:
        raise HarnessError("'messages' is missing", param="messages")
    try:
        messages = _entries(raw)
    except (ValueError, RecursionError):
        raise HarnessError("'messages' must be a list of objects", param="messages") from None
    for i, item in enumerate(messages):
        if item[:1] != b"{":
            raise HarnessError(f"'messages[{i}]' must be an object", param=f"messages[{i}]")
    return messages


def _entries(raw: Raw) -> list[bytes]:
    try:
        return [bytes(item) for item in _LIST.decode(raw)]
    except msgspec.DecodeError:
        decoded = json.loads(bytes(raw))
        if not isinstance(decoded, list):
            raise
        return [json.dumps(item).encode() for item in decoded]


def _render_args(fields: dict[str, Raw], tools: Raw | None) -> RenderArgs:
    kwargs = dict(_member(fields, "chat_template_kwargs", (dict,), {}))
    effort = _member(fields, "reasoning_effort", (str,), None)
    documents = _member(fields, "documents", (list,), None)
    if documents is not None:
        kwargs["documents"] = documents
    if effort is not None:  # /tokenize ignores the member itself (vLLM 0.32)
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    members: dict[str, Raw] = {name: fields[name] for name in _RENDERED_BY_BOTH if name in fields}
    offered = tools if tools is not None and bytes(tools) not in {b"null", b"[]"} else None
    chat: dict[str, Raw] = {name: fields[name] for name in _RENDERED_BY_CHAT if name in fields}
    if offered is not None and bytes(fields.get("tool_choice", _NULL)) == b'"none"':
        chat["tool_choice"] = fields["tool_choice"]
    try:
        template = canonical_json([kwargs, {name: msgspec.json.decode(raw) for name, raw in members.items()}])
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"the template's arguments cannot be read: {why}", param="chat_template_kwargs") from None
    digest = xxhash.xxh3_128_digest(b"%d%d" % (offered is not None, "tool_choice" in chat) + template)
    return RenderArgs(digest, xxhash.xxh3_128_digest(template), members, chat, kwargs, offered)


def _scope(call: ChatCall) -> bytes:
    h = xxhash.xxh3_128(call.model.encode("utf-8", "surrogatepass") + b"\0")
    for name in ("tools", *_RENDERED_BY_BOTH, *_RENDERED_BY_CHAT):
        raw = call.fields.get(name)
        if raw is not None and bytes(raw) not in {b"null", b"[]", b"{}"}:
            h.update(name.encode() + b"=" + _canonical_member(bytes(raw)))
    return h.digest()


_members: dict[bytes, bytes] = {}


def _canonical_member(raw: bytes) -> bytes:
    """Digest a member by value; tool lists are long and nearly always the same, so what was read is remembered."""
    key = xxhash.xxh3_128_digest(raw)
    known = _members.get(key)
    if known is None:
        if len(_members) >= 4096:  # noqa: PLR2004 - many times the tool lists of one training run
            _members.clear()
        known = _members[key] = xxhash.xxh3_128_digest(canonical_json(msgspec.json.decode(raw)))
    return known


def _plain_reason(call: ChatCall) -> str:
    """Name what in a request keeps the engine from using supplied ids, or makes the prompt no plain chat turn."""
    fields = call.fields
    found = {
        "media": call.media,
        "no-messages": not call.raw_messages,
        "continue-final-message": _member(fields, "continue_final_message", (bool,), False),
        "no-generation-prompt": not _member(fields, "add_generation_prompt", (bool,), True),
        "echo": _member(fields, "echo", (bool,), False),
        "truncated-prompt": _member(fields, "truncate_prompt_tokens", (int,), -1) != -1,
    }
    return next((reason for reason, there in found.items() if there), "")
