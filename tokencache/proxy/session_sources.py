"""Session sources: headers and members of a request's body that name the session because the operator chose them (`--session-from`).

    --session-from header:X-Session-ID,body:conversation_params.conversation_id

Many clients send ids of their own. By default the proxy never reads them: it cannot know whether such an id means one rollout. The
operator can. A listed header or member names the session wherever the path, the session header and the API key name none. Within
a session no listed header or member reaches the engine: vLLM would ignore it, a strict engine refuses it. A request that
belongs to no session is relayed with all its headers and members.

What NeMo Gym sends of this kind (nemo-gym 0.7.0): `conversation_params.conversation_id` in the body (`vllm_model` with
`forward_session_id_as_conversation_id`, `responses_api_models/vllm_model/app.py`), `x-session-id`
(`responses_api_agents/miniswe_sandboxed_agent`, `terminus_2_sandboxed_agent`, `verifiers_agent`) and `x-switchyard-session-id`
(`responses_api_models/switchyard_model/app.py`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import msgspec

from tokencache.dialects.body import fields_of
from tokencache.errors import HarnessError

_ENCODER = msgspec.json.Encoder()


class InBody(NamedTuple):
    """What a body names: its session, `None` if it names none, and the body without all listed members."""

    session: str | None
    rest: bytes


class SessionSources(NamedTuple):
    """The listed headers, and the listed members of the body, each as the path of names that leads to it."""

    headers: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, listed: Sequence[str]) -> Self:
        """Read a list of `header:NAME` and `body:NAME` or `body:NAME.NAME`.

        Raises:
            ValueError: an entry is none of these.
        """
        headers, members = list[str](), list[tuple[str, ...]]()
        for entry in listed:
            place, _, name = entry.partition(":")
            path = tuple(name.split("."))
            if place == "header" and name:
                headers.append(name)
            elif place == "body" and all(path):
                members.append(path)
            else:
                raise ValueError(f"{entry!r} names no source of sessions: write header:NAME, body:MEMBER or body:MEMBER.MEMBER")
        return cls(tuple(headers), tuple(members))

    def in_headers(self, headers: Mapping[str, str]) -> str | None:
        """The first listed header that a request has, `None` if it has none."""
        return next((headers[name] for name in self.headers if headers.get(name)), None)

    def in_body(self, body: bytes) -> InBody:
        """Take the listed members out of a body; the first that is there names the session.

        Raises:
            HarnessError: a listed member is not a string.
        """
        found: str | None = None
        for path in self.members:
            if b'"%s"' % path[-1].encode() not in body:
                continue
            try:
                fields = fields_of(body)
            except HarnessError:
                return InBody(found, body)  # not a JSON object: whoever serves the request says so
            named = _take(fields, path)
            if named is None:
                continue
            body = _ENCODER.encode(fields)
            found = found or named
        return InBody(found or None, body)


def _take(fields: dict[str, msgspec.Raw], path: tuple[str, ...]) -> str | None:
    """Take the member at a path out of these members, and every object on the way that is empty then."""
    name, *rest = path
    raw = fields.get(name)
    if raw is None:
        return None
    if rest:
        try:
            inner = fields_of(bytes(raw))
        except HarnessError:
            return None  # not an object: the path leads nowhere
        named = _take(inner, tuple(rest))
        if named is not None and inner:
            fields[name] = msgspec.Raw(_ENCODER.encode(inner))
        elif named is not None:
            del fields[name]
        return named
    try:
        value = msgspec.json.decode(raw, type=str | None)
    except msgspec.ValidationError:
        raise HarnessError(f"{name!r} names the session here and must be a string", param=name) from None
    del fields[name]
    return value or ""
