"""Reads and writes token ids on messages, in the form that NeMo Gym's model server and agents use.

    {"role": "assistant", "content": "…", "prompt_token_ids": […], "generation_token_ids": […], "generation_log_probs": […]}

Gym carries ids from turn to turn on the messages: its model server puts all three members, or none, on the message of a chat completion and
on the last output item of a response. Agents send them back with the history, and NeMo RL reads them from the finished rollout. With
`--return-token-id-information` the proxy writes replies like this. In a stream the ids are on the delta that finishes its choice, or on
the last item.

The ids are removed from every request before it is parsed. So an agent that sends them back and one that drops them get the same prompts,
hashes and records, apart from white space. The ids indicate which recorded turn a message is, and are compared with the record
(`proxy.client_ids`). Ids that were never recorded are used only if they are proven.

Sources: nemo-gym 0.7.0, `nemo_gym/openai_utils.py` (`TokenIDLogProbMixin`, `_validate_atomic_token_metadata`),
`nemo_gym/responses_converter.py` (the item that carries them), `responses_api_models/vllm_model/app.py` (the message);
NVIDIA-NeMo/Gym #1554 (which components may create them).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tokencache.core import ids
from tokencache.dialects.json_io import FIELDS, IDS, OBJECTS, fields_of
from tokencache.errors import HarnessError

Raw = msgspec.Raw

PROMPT, GENERATION, LOG_PROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
PREFIX = "required_prefix_token_ids"
"""The ids with which a request requires its prompt to begin (NVIDIA-NeMo/Gym #1545; nemo-gym 0.7.0, `supply_prefix_token_ids`)."""

TAKEN = frozenset({PROMPT, GENERATION, LOG_PROBS, "routed_experts"})
"""The members that are removed from the messages of a request."""
_MARK = b'_token_ids"'
"""Part of the names of both members with ids. It cannot occur within a JSON string, where its quote would be escaped."""
_ESCAPED = b"\\u00"
"""Begins an ASCII character that is written as an escape, as it may be in the name of a member."""
_GENERATED = b'"generation_token_ids"'
_BLANK = b" \t\r\n"
_INDEX = msgspec.json.Decoder(int)
_NULL = b"null"


class ReturnedIdFragments(msgspec.Struct, frozen=True):
    """Ids that a client sent back on a message, as JSON fragments (`b"1,2,3"`): those of its prompt, and the generated ones."""

    prompt: bytes
    generation: bytes

    @property
    def whole(self) -> bytes:
        """Both as one fragment."""
        return b",".join(part for part in (self.prompt, self.generation) if part)


class _Choice(Protocol):
    """A choice as it is collected (`engine.reply.Choice`): ids, their log probabilities, its own prompt's raw JSON list."""

    prompt: bytes

    @property
    def ids(self) -> Sequence[int]:
        """The sampled ids."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The log probabilities."""


def take_out(raw: bytes) -> tuple[bytes, ReturnedIdFragments | None]:
    """Remove token ids from a message or an item.

    Returns:
        Its JSON, the same object if nothing was removed; and the ids, `None` if it had none.

    Raises:
        HarnessError: it has a member twice.
    """
    if raw[:1] != b"{":
        return raw, None
    fields = fields_of(raw)
    taken = {name: bytes(fields.pop(name)) for name in TAKEN if name in fields}
    if not taken:
        return raw, None  # the ids are nested: in arguments, or in the result of a tool
    returned = any(taken.get(name, _NULL) != _NULL for name in (PROMPT, GENERATION))
    echo = ReturnedIdFragments(_fragment(taken.get(PROMPT)), _fragment(taken.get(GENERATION))) if returned else None
    return msgspec.json.encode(fields), echo


def carries(body: bytes) -> bool:
    """Whether a message in a body may have generated ids; does not parse the body."""
    return _GENERATED in body


def may_carry(raw: bytes) -> bool:
    """Whether some JSON may name token ids; a name may be written with escapes."""
    return _MARK in raw or _ESCAPED in raw


def take_prefix(fields: dict[str, Raw]) -> bytes:
    """Remove the ids with which the prompt has to begin from a request's members, in place.

    Returns:
        Packed ids; empty if none are required (`null`, an empty list, or no such member).

    Raises:
        HarnessError: the member is not a list of token ids.
    """
    raw = bytes(fields.pop(PREFIX, _NULL))
    try:
        return ids.pack(IDS.decode(raw)) if raw != _NULL else b""
    except (ValueError, OverflowError):
        raise HarnessError(f"{PREFIX!r} must be a list of token ids", param=PREFIX) from None


def prefix_of(body: bytes) -> bytes:
    """Return the ids (packed) with which a request in any dialect requires its prompt to begin; raises as `take_prefix` does."""
    return take_prefix(fields_of(body)) if PREFIX.encode() in body or _ESCAPED in body else b""


def take_all(entries: Sequence[bytes], start: int) -> tuple[Sequence[bytes], dict[int, ReturnedIdFragments]]:
    """Remove token ids from entries; the first has the index `start`.

    Returns:
        The entries, the same object if nothing was removed; and the removed ids, by index.
    """
    bare: list[bytes] = []
    echoes: dict[int, ReturnedIdFragments] = {}
    for index, entry in enumerate(entries, start):
        if _MARK not in entry and _ESCAPED not in entry:
            continue  # nearly always
        left, echo = take_out(entry)
        if left is not entry:
            bare = bare or list(entries)
            bare[index - start] = left
        if echo is not None:
            echoes[index] = echo
    return bare or entries, echoes


def _fragment(raw: bytes | None) -> bytes:
    """Return a raw JSON list as a fragment. Any other value is returned without white space; it then equals no recorded ids."""
    if raw is None:
        return b""
    packed = raw.translate(None, _BLANK)
    return packed[1:-1] if packed[:1] == b"[" else packed


def with_tokens(data: bytes, prompt: bytes, choices: Callable[[], Mapping[int, _Choice]]) -> bytes:
    """Add the ids of every choice that this completion, or chunk of one, finishes.

    Args:
        data: the completion's JSON.
        prompt: the raw JSON list of the prompt's ids, `b""` if the engine did not send them.
        choices: returns the choices whose ids and log probabilities are all certain. Any other gets none of the members.

    Returns:
        The JSON, the same object if nothing was added.
    """
    if b'"finish_reason"' not in data:
        return data
    try:
        fields = FIELDS.decode(data)
        listed = OBJECTS.decode(fields["choices"])
        added = [_add_ids(choice, prompt, choices) for choice in listed]
    except (ValueError, KeyError, RecursionError):
        return data  # not a completion; an error, for example
    if not any(added):
        return data
    fields["choices"] = Raw(msgspec.json.encode(listed))
    return msgspec.json.encode(fields)


def _add_ids(choice: dict[str, Raw], prompt: bytes, choices: Callable[[], Mapping[int, _Choice]]) -> bool:
    """Put a choice's ids on its message or delta if it is finished and they are known."""
    if bytes(choice.get("finish_reason", _NULL)) == _NULL:
        return False
    known = choices().get(_INDEX.decode(choice.get("index", b"0")))
    part = "message" if "message" in choice else "delta"
    own = (known.prompt if known is not None else b"") or prompt
    if known is None or not own or part not in choice or len(known.logprobs) != len(known.ids):
        return False
    tokens = {
        PROMPT: Raw(own),
        GENERATION: Raw(msgspec.json.encode(list(known.ids))),
        LOG_PROBS: Raw(msgspec.json.encode(list(known.logprobs))),
    }
    choice[part] = Raw(msgspec.json.encode({**FIELDS.decode(choice[part]), **tokens}))
    return True
