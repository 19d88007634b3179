"""Gym: token ids on messages, as NeMo Gym's model server says them, and as its agents send them back.

    {"role": "assistant", "content": "…", "prompt_token_ids": […], "generation_token_ids": […], "generation_log_probs": […]}

Gym carries ids from turn to turn on the messages themselves: its model server puts all three members, or none, on the message
of a chat completion, and on the last output item of a response; agents send them back with the history, and NeMo RL reads them
out of the finished rollout. With `--return-token-id-information` replies are said so here, too. A streamed reply has them on the
delta with which its choice is finished, and on the last item.

What comes back is taken out of every request before anybody reads it: nothing that is sent, hashed or kept differs, but for white
space, between an agent that sends the members back and one that drops them. The ids are evidence of which recorded turn is meant, and
are compared with what was recorded (`proxy.client_ids.compare`). Where nothing was, they are used if they are proven (`proxy.client_ids`).

Sources: nemo-gym 0.7.0, `nemo_gym/openai_utils.py` (`TokenIDLogProbMixin`, `_validate_atomic_token_metadata`),
`nemo_gym/responses_converter.py` (the item that carries them), `responses_api_models/vllm_model/app.py` (the message);
NVIDIA-NeMo/Gym #1554 (who makes them, who may not).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tokencache.core import ids
from tokencache.dialects.json_io import fields_of
from tokencache.errors import HarnessError

Raw = msgspec.Raw

PROMPT, GENERATION, LOG_PROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
PREFIX = "required_prefix_token_ids"
"""The ids with which a request requires its prompt to begin (NVIDIA-NeMo/Gym #1545; nemo-gym 0.7.0, `supply_prefix_token_ids`)."""

TAKEN = frozenset({PROMPT, GENERATION, LOG_PROBS, "routed_experts"})
"""The members that are taken out of what comes back."""
_MARK = b'_token_ids"'
"""In the names of both members with ids. No string in JSON can spell it: its quote would be escaped."""
_GENERATED = b'"generation_token_ids"'
_BLANK = b" \t\r\n"
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_INDEX = msgspec.json.Decoder(int)
_IDS = msgspec.json.Decoder(list[int])
_ENCODER = msgspec.json.Encoder()
_NULL = b"null"


class ReturnedIdFragments(msgspec.Struct, frozen=True):
    """Ids that came back with a message, as JSON fragments (`b"1,2,3"`): its prompt's, and those that were generated."""

    prompt: bytes
    generation: bytes

    @property
    def whole(self) -> bytes:
        """Both as one fragment."""
        return b",".join(part for part in (self.prompt, self.generation) if part)


class _Choice(Protocol):
    """A choice as it is collected (`engine.reply.Choice`): ids, their log probabilities, its own prompt's raw JSON list."""

    ids: list[int]
    logprobs: list[float]
    prompt: bytes


def take_out(raw: bytes) -> tuple[bytes, ReturnedIdFragments | None]:
    """Take token ids out of a message or an item.

    Returns:
        Its JSON, the very bytes where there was nothing to take out; and what came back, `None` if no ids did.
    """
    if _MARK not in raw:
        return raw, None
    try:
        fields = fields_of(raw)
    except HarnessError:  # no message at all: for who reads it to say
        return raw, None
    taken = {name: bytes(fields.pop(name)) for name in TAKEN if name in fields}
    if not taken:
        return raw, None  # they stand deeper: in arguments, or in what a tool said
    told = any(taken.get(name, _NULL) != _NULL for name in (PROMPT, GENERATION))
    echo = ReturnedIdFragments(_fragment(taken.get(PROMPT)), _fragment(taken.get(GENERATION))) if told else None
    return _ENCODER.encode(fields), echo


def carries(body: bytes) -> bool:
    """Whether a message in a body came back with ids that were generated, as far as can be seen without reading it."""
    return _GENERATED in body


def take_prefix(fields: dict[str, Raw]) -> bytes:
    """Take the ids with which the prompt is to begin out of a request's members, in place.

    Returns:
        Packed ids; none where nothing is required (`null`, an empty list, or no such member).

    Raises:
        HarnessError: they are no list of token ids.
    """
    raw = bytes(fields.pop(PREFIX, _NULL))
    try:
        return ids.pack(_IDS.decode(raw)) if raw != _NULL else b""
    except (ValueError, OverflowError):
        raise HarnessError(f"{PREFIX!r} must be a list of token ids", param=PREFIX) from None


def prefix_of(body: bytes) -> bytes:
    """Return the ids (packed) with which a request in any dialect requires its prompt to begin; raises as `take_prefix` does."""
    return take_prefix(fields_of(body)) if PREFIX.encode() in body else b""


def take_all(entries: Sequence[bytes], start: int) -> tuple[Sequence[bytes], dict[int, ReturnedIdFragments]]:
    """Take token ids out of the entries from `start` on.

    Returns:
        All entries, the very ones where there was nothing to take out; and what came back, by place.
    """
    bare, echoes = list[bytes](), dict[int, ReturnedIdFragments]()
    for place, entry in enumerate(entries[start:], start):
        left, echo = take_out(entry)
        if left is not entry:
            bare = bare or list(entries)
            bare[place] = left
        if echo is not None:
            echoes[place] = echo
    return bare or entries, echoes


def _fragment(raw: bytes | None) -> bytes:
    """A raw JSON list as a fragment; what is no list as it is, which no ids equal."""
    if raw is None:
        return b""
    packed = raw.translate(None, _BLANK)
    return packed[1:-1] if packed[:1] == b"[" else packed


def with_tokens(data: bytes, prompt: bytes, choices: Mapping[int, _Choice]) -> bytes:
    """Say the ids of every choice that this completion, or chunk of one, finishes.

    `prompt` is the raw JSON list of the prompt's ids, `b""` if the engine did not say them; `choices` is what was collected up to
    here. A choice whose ids or log probabilities are not all known has none of the members.

    Returns:
        The JSON, the very bytes where nothing is finished or known.
    """
    if b'"finish_reason"' not in data:
        return data
    try:
        fields = _FIELDS.decode(data)
        listed = _CHOICES.decode(fields["choices"])
        said = [_say(choice, prompt, choices) for choice in listed]
    except (ValueError, KeyError, RecursionError):
        return data  # no completion: an error, say
    if not any(said):
        return data
    fields["choices"] = Raw(_ENCODER.encode(listed))
    return _ENCODER.encode(fields)


def _say(choice: dict[str, Raw], prompt: bytes, choices: Mapping[int, _Choice]) -> bool:
    """Put a choice's ids on its message or delta, if it is finished and they are known."""
    if bytes(choice.get("finish_reason", _NULL)) == _NULL:
        return False
    known = choices.get(_INDEX.decode(choice.get("index", b"0")))
    place = "message" if "message" in choice else "delta"
    own = (known.prompt if known is not None else b"") or prompt
    if known is None or not own or place not in choice or len(known.logprobs) != len(known.ids):
        return False
    tokens = {PROMPT: Raw(own), GENERATION: Raw(_ENCODER.encode(known.ids)), LOG_PROBS: Raw(_ENCODER.encode(known.logprobs))}
    choice[place] = Raw(_ENCODER.encode({**_FIELDS.decode(choice[place]), **tokens}))
    return True
