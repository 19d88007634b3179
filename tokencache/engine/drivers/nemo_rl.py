"""The drivers for NVIDIA's stack: NeMo RL's vLLM worker, and NeMo Gym's model server before it.

Both say a prompt's *beginning*, up to the end of the last assistant's message, and let the engine put the template's tail
behind it. NeMo RL's worker renders the messages, counts the ends of turn up to that message, and cuts there
(`nemo_rl/models/generation/openai_server_utils.py`), so ids of any other message would be cut at the wrong place, without a
word. Therefore nothing is handed in unless the known history ends with just that message. Ids that a harness put on its messages are
gone by then (`dialects.gym`): a mixture of ours and theirs is what goes wrong silently there.

* `nemo-rl` says `required_prefix_token_ids`, which beats all ids on messages. The worker
  (`nemo_rl/models/generation/vllm/vllm_worker_async.py`, vLLM 0.25) asserts `temperature`, `top_p` and `top_k` to be the
  trainer's own, which a client sees as a bare 500; wants `top_logprobs` said together with `logprobs`; and does not stream.
* `nemo-gym` says `prompt_token_ids`, `generation_token_ids` and `generation_log_probs` on the message. Gym's server passes them
  on, and the worker behind it takes the last message that has them; so that one message is given them, and the history's
  other replies are not. A message's `reasoning` goes into its text as `<think>…</think>`, where Gym's server looks for it. Members
  of a request that Gym does not know it refuses (422: `extra="forbid"` in
  `nemo_gym/openai_utils.py`); they travel in `metadata.extra_body`, which it unpacks for the engine
  (`responses_api_models/vllm_model/app.py`).

Both answer with those three members on `choices[].message` (Gym with `return_token_id_information: true`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.gym import GENERATION, LOG_PROBS, PREFIX, PROMPT
from tokencache.dialects.gym_request import CHAT_MEMBERS
from tokencache.dialects.thinking import in_text
from tokencache.engine.drivers.base import Exact, Head, last_reply
from tokencache.engine.drivers.vllm import NOT_WHOLE, members_with_ids

if TYPE_CHECKING:
    from tokencache.engine.drivers.text_prompts import TokenPrompts

Raw = msgspec.Raw

_TOKEN_FIELDS = (PROMPT, GENERATION, LOG_PROBS)
SAFE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""What NeMo RL samples with unless it is configured otherwise: the distribution of the model itself."""
NOT_LAST = "prefix-ends-before-last-reply"

_NULL = Raw(b"null")
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_NUMBERS = msgspec.json.Decoder(list[float])
_ENCODER = msgspec.json.Encoder()


class _Nemo:
    """What both drivers have in common."""

    streams = False
    adds_tail = True
    detour: "TokenPrompts | None" = None

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        """Set up a driver; `sampling` is the trainer's policy for all sessions."""
        self.pinned: Mapping[str, Any] = {**SAFE, **{name: value for name, value in sampling.items() if name in SAFE}}

    def read(self, body: bytes) -> bytes:
        """See `Driver.read`."""
        return lifted(body)


class NemoRl(_Nemo):
    """See `driver.Driver`."""

    name = "nemo-rl"
    how = "required_prefix_token_ids begin the prompt"
    says_logprobs = False

    def write(self, call: ChatCall, exact: Exact | None) -> bytes:
        """See `Driver.write`."""
        fields = members_with_ids(call)
        if bytes(fields.get("top_logprobs", _NULL)) == b"null":
            fields["top_logprobs"] = Raw(b"0")
        for name in NOT_WHOLE:
            fields.pop(name, None)
        if exact is not None:
            if call.malformed:
                fields["messages"] = _messages(call.safe_messages())
            fields[PREFIX] = Raw(b"[" + ids.fragment(ids.head(exact.ids, exact.head.end)) + b"]")
        return _ENCODER.encode(fields)

    def unsayable(self, call: ChatCall, head: Head) -> str:
        """See `Driver.unsayable`."""
        return "" if head.place == last_reply(call) else NOT_LAST

    def question(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `Driver.question`."""
        return {"logprobs": True, "top_logprobs": 0, **body, **self.pinned}

    def supplied(self, asked: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.supplied`."""
        return {"messages": [Raw(asked), Raw(reply), Raw(asked)], PREFIX: prompt}


class NemoGym(_Nemo):
    """See `driver.Driver`."""

    name = "nemo-gym"
    how = "the ids on the last assistant's message begin the prompt"
    says_logprobs = True

    def write(self, call: ChatCall, exact: Exact | None) -> bytes:
        """See `Driver.write`."""
        messages = list(call.raw_messages if exact is None else call.safe_messages())
        if exact is not None:
            place, start, end, logprobs = exact.head
            given = (ids.head(exact.ids, start), ids.tail(ids.head(exact.ids, end), start))
            messages[place] = _ENCODER.encode(
                _FIELDS.decode(messages[place])
                | {name: Raw(b"[" + ids.fragment(packed) + b"]") for name, packed in zip(_TOKEN_FIELDS, given, strict=False)}
                | {LOG_PROBS: Raw(_ENCODER.encode(ids.unpack_logprobs(logprobs)[: end - start]))}
            )
        fields = call.fields | {"messages": _messages([in_text(message) for message in messages])}
        return _ENCODER.encode(_as_gym_takes(fields))

    def unsayable(self, call: ChatCall, head: Head) -> str:
        """See `Driver.unsayable`."""
        if head.place != last_reply(call):
            return NOT_LAST
        return "" if head.logprobs else "no-logprobs"

    def question(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `Driver.question`."""
        return _as_gym_takes({name: Raw(_ENCODER.encode(value)) for name, value in {**body, **self.pinned}.items()})

    def supplied(self, asked: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.supplied`."""
        told = {**_FIELDS.decode(reply), PROMPT: prompt[:-1], GENERATION: prompt[-1:], LOG_PROBS: [-1.0]}
        return {"messages": [Raw(asked), told, Raw(asked)]}


def lifted(body: bytes) -> bytes:
    """Put the ids and log probabilities that stand on an answer's messages where vLLM has them; routed experts likewise.

    An answer whose messages have none is given back as it is.
    """
    if b'"%s"' % GENERATION.encode() not in body:
        return body
    try:
        fields = _FIELDS.decode(body)
        choices = _CHOICES.decode(fields["choices"])
        for choice in choices:
            message = _FIELDS.decode(choice["message"])
            prompt, sampled, values = (message.pop(name, _NULL) for name in _TOKEN_FIELDS)
            fields["prompt_token_ids"] = prompt
            choice["token_ids"] = sampled
            if bytes(choice.get("logprobs", _NULL)) == b"null":
                choice["logprobs"] = _as_logprobs(sampled, values)
            if "routed_experts" in message:
                choice["routed_experts"] = message.pop("routed_experts")
            choice["message"] = Raw(_ENCODER.encode(message))
    except (ValueError, KeyError, RecursionError):
        return body
    fields["choices"] = Raw(_ENCODER.encode(choices))
    return _ENCODER.encode(fields)


def _as_logprobs(sampled: Raw, values: Raw) -> Raw:
    if bytes(values) == b"null":
        return _NULL
    tokens = msgspec.json.decode(sampled, type=list[int])
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(tokens, _NUMBERS.decode(values), strict=False)
    ]
    return Raw(_ENCODER.encode({"content": content}))


def _messages(raw: Sequence[bytes]) -> Raw:
    return Raw(b"[" + b",".join(raw) + b"]")


def _as_gym_takes(fields: dict[str, Raw]) -> dict[str, Any]:
    """Put the members that Gym's server does not know where it takes them from (`metadata`)."""
    strange = {
        name: raw
        for name, raw in fields.items()
        if name not in CHAT_MEMBERS and name not in {*NOT_WHOLE, PREFIX, "kv_transfer_params"} and bytes(raw) != b"null"
    }
    known: dict[str, Any] = {name: raw for name, raw in fields.items() if name in CHAT_MEMBERS}
    if not strange:
        return known
    metadata = dict(msgspec.json.decode(fields.get("metadata", Raw(b"{}"))) or {})
    arguments = strange.pop("chat_template_kwargs", None)
    if arguments is not None:
        metadata["chat_template_kwargs"] = bytes(arguments).decode()
    if strange:
        own = metadata.get("extra_body")
        metadata["extra_body"] = _ENCODER.encode({**(_FIELDS.decode(own) if isinstance(own, str) else {}), **strange}).decode()
    return {**known, "metadata": metadata}
