"""Collects what shapes the prompt of a chat request besides its messages: template arguments, tools and similar members."""

import hashlib
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash

from tokencache.core.messages import SORTED_JSON
from tokencache.dialects.json_io import NULL, read_members, value_of
from tokencache.dialects.members import RENDERED_BY_BOTH, RENDERED_BY_CHAT
from tokencache.errors import HarnessError
from tokencache.recent import Recent

Raw = msgspec.Raw

_ARGUMENTS: Mapping[str, tuple[tuple[type, ...], Any]] = {
    "chat_template_kwargs": ((dict,), {}),
    "reasoning_effort": ((str,), None),
    "documents": ((list,), None),
}
"""Members that become arguments of the template: their types and defaults."""
_SHAPING = frozenset({*_ARGUMENTS, *RENDERED_BY_BOTH, *RENDERED_BY_CHAT, "tool_choice"})
NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""Stands for an empty dictionary, which takes 64 bytes each time, for as long as a stream."""


class RenderArgs(msgspec.Struct, frozen=True):
    """What shapes a prompt besides the messages, in the form that `/tokenize` accepts.

    Attributes:
        digest: of everything here but the content of the tools.
        template: digest of the template's arguments alone.
        members: top-level members.
        chat: members that only chat completions accept.
        kwargs: template arguments, with `chat` folded in.
        tools: raw JSON of the tools; `None` without any.
    """

    digest: bytes
    template: bytes
    members: Mapping[str, Raw]
    chat: Mapping[str, Raw]
    kwargs: Mapping[str, Any]
    tools: Raw | None = None


def render_args(fields: dict[str, Raw], tools: Raw | None) -> RenderArgs:
    """Collect a request's rendering arguments.

    Raises:
        HarnessError: one of them has the wrong type or cannot be read.
    """
    offered = tools if tools is not None and bytes(tools) not in {b"null", b"[]"} else None
    if _SHAPING.isdisjoint(fields):  # as in most requests
        return RenderArgs(_NO_ARGUMENTS + b"%d0" % (offered is not None), _NO_ARGUMENTS, NOTHING, NOTHING, NOTHING, offered)
    found = read_members(fields, _ARGUMENTS)
    kwargs, effort, documents = dict(found["chat_template_kwargs"]), found["reasoning_effort"], found["documents"]
    if documents is not None:
        kwargs["documents"] = documents
    if effort is not None:  # /tokenize ignores the member itself (vLLM 0.32)
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    both: dict[str, Raw] = {name: fields[name] for name in RENDERED_BY_BOTH if name in fields}
    chat: dict[str, Raw] = {name: fields[name] for name in RENDERED_BY_CHAT if name in fields}
    if offered is not None and value_of(fields.get("tool_choice", NULL)) == "none":
        chat["tool_choice"] = fields["tool_choice"]
    try:
        template = _hash(SORTED_JSON.encode([kwargs, dict(zip(both, map(msgspec.json.decode, both.values()), strict=True))]))
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"the template's arguments cannot be read: {why}", param="chat_template_kwargs") from None
    digest = template + b"%d%d" % (offered is not None, "tool_choice" in chat)
    return RenderArgs(digest, template, both or NOTHING, chat or NOTHING, kwargs or NOTHING, offered)


def scope_of(model: str, fields: dict[str, Raw]) -> bytes:
    """Digest everything that shapes a prompt besides its messages (16 bytes): the prompt context of a chain."""
    h = hashlib.sha256(model.encode("utf-8", "surrogatepass") + b"\0")
    for name in ("tools", *RENDERED_BY_BOTH, *RENDERED_BY_CHAT):
        raw = fields.get(name)
        if raw is not None and bytes(raw) not in {b"null", b"[]", b"{}"}:
            h.update(name.encode() + b"=" + _canonical_member(bytes(raw)))
    return h.digest()[:16]


def _hash(data: bytes) -> bytes:
    """Return 16 bytes of SHA-256: clients choose the data, and what is learned under its hash applies to all sessions."""
    return hashlib.sha256(data).digest()[:16]


_NO_ARGUMENTS = _hash(SORTED_JSON.encode([{}, {}]))
"""`RenderArgs.template` of requests without arguments."""
_digests: Recent[bytes, bytes] = Recent(4096)
"""Digests of members, by the hash of their bytes, because tool lists are long and rarely change. A training run has far fewer than 4096."""
_seed = secrets.randbits(64)
"""Seed of that hash, which is not cryptographic (xxh3). Without the seed clients cannot construct collisions."""


def _canonical_member(raw: bytes) -> bytes:
    """Digest a member by value; 1 is not 1.0, because a template writes them differently."""
    key = xxhash.xxh3_128_digest(raw, _seed)
    known = _digests.get(key)
    if known is None:
        known = _digests[key] = _hash(SORTED_JSON.encode(msgspec.json.decode(raw)))
    return known
