"""Drives NeMo RL's vLLM worker.

A request supplies only the *beginning* of a prompt, up to the end of the last assistant message, and the engine adds the template's tail.
NeMo RL's worker renders the messages, counts the ends of turn up to that message, and cuts there
(`nemo_rl/models/generation/openai_server_utils.py`). If the supplied ids ended with any other message, the worker would silently cut at the
wrong place. So nothing is supplied unless the known history ends with exactly that message. Ids that a harness put on its messages are
removed before (`dialects.gym`), because the worker would silently mix them with those of the proxy.

`required_prefix_token_ids` overrides all ids on messages. The worker (`nemo_rl/models/generation/vllm/vllm_worker_async.py`, vLLM 0.25)
asserts that `temperature`, `top_p` and `top_k` are the trainer's own; a client receives a failed assertion as a 500 without a message. The
worker requires `top_logprobs` with `logprobs`, and does not stream. A reply has its ids and log probabilities as `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs` in `choices[].message`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_members
from tokencache.dialects.gym import GENERATION, LOG_PROBS, PREFIX, PROMPT
from tokencache.dialects.json_io import FIELDS, NULL, OBJECTS
from tokencache.engine.drivers.base import Driver, EngineRequest, ExactPrompt, LastReply, Target, last_reply_place
from tokencache.engine.drivers.vllm import binds_late, members_with_ids

Raw = msgspec.Raw

TOKEN_MEMBERS = (PROMPT, GENERATION, LOG_PROBS)
"""Members of a message with its prompt's ids, its own ids, and their log probabilities."""
DEFAULT_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""NeMo RL's default sampling parameters: the model's own distribution."""

_NUMBERS = msgspec.json.Decoder(list[float])


class NemoDriver(Driver):
    """Common base of the drivers for NeMo RL and NeMo Gym."""

    streams = False
    adds_tail = True

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        """Create a driver; `sampling` is the trainer's policy for all sessions."""
        self.pinned = {**DEFAULT_SAMPLING, **{name: value for name, value in sampling.items() if name in DEFAULT_SAMPLING}}

    def read(self, body: bytes) -> bytes:
        """See `Driver.read`."""
        return ids_from_messages(body)

    def cannot_supply(self, call: ChatCall, last_reply: LastReply) -> str:
        """See `Driver.cannot_supply`."""
        return "" if last_reply.place == last_reply_place(call) else Reason.PREFIX_ENDS_BEFORE_LAST_REPLY


class NemoRl(NemoDriver):
    """The driver `nemo-rl`."""

    name = "nemo-rl"
    capacity_route = ""
    how = "required_prefix_token_ids begin the prompt"
    refusal_hint = "NeMo RL's worker does so if sampling parameters are not the trainer's: set them with --sampling"

    async def request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        """See `Driver.request`."""
        return msgspec.structs.replace(await super().request(call, prompt, target), late_grammar=binds_late(call))

    def write(self, call: ChatCall, prompt: ExactPrompt | None) -> bytes:
        """See `Driver.write`."""
        fields = whole_members(members_with_ids(call))
        if bytes(fields.get("top_logprobs", NULL)) == b"null":
            fields["top_logprobs"] = Raw(b"0")
        if prompt is not None:
            if call.malformed:
                fields["messages"] = Raw(b"[" + b",".join(call.safe_messages()) + b"]")
            fields[PREFIX] = Raw(b"[" + ids.fragment(ids.head(prompt.ids, prompt.last_reply.end)) + b"]")
        return msgspec.json.encode(fields)

    def own_request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Driver.own_request`."""
        return {"logprobs": True, "top_logprobs": 0, **body, **self.pinned}

    def probe_members(self, question: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.probe_members`."""
        return {"messages": [Raw(question), Raw(reply), Raw(question)], PREFIX: prompt}


def ids_from_messages(body: bytes) -> bytes:
    """Move ids, log probabilities and routed experts from the messages of a reply to where vLLM has them.

    A reply without ids in its messages is returned unchanged.
    """
    if b'"%s"' % GENERATION.encode() not in body:
        return body
    try:
        fields = FIELDS.decode(body)
        choices = OBJECTS.decode(fields["choices"])
        for choice in choices:
            message = FIELDS.decode(choice["message"])
            prompt, sampled, logprobs = (message.pop(name, NULL) for name in TOKEN_MEMBERS)
            fields["prompt_token_ids"] = prompt
            choice["token_ids"] = sampled
            if bytes(choice.get("logprobs", NULL)) == b"null":
                choice["logprobs"] = _as_chat_logprobs(sampled, logprobs)
            if "routed_experts" in message:
                choice["routed_experts"] = message.pop("routed_experts")
            choice["message"] = Raw(msgspec.json.encode(message))
    except (ValueError, KeyError, RecursionError):
        return body
    fields["choices"] = Raw(msgspec.json.encode(choices))
    return msgspec.json.encode(fields)


def _as_chat_logprobs(sampled: Raw, logprobs: Raw) -> Raw:
    """Write log probabilities as a chat completion has them; `null` if there are none, or not as many as ids."""
    if bytes(logprobs) == b"null":
        return NULL
    tokens, values = msgspec.json.decode(sampled, type=list[int]), _NUMBERS.decode(logprobs)
    if len(tokens) != len(values):
        return NULL
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(tokens, values, strict=True)
    ]
    return Raw(msgspec.json.encode({"content": content}))
