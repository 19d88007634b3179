"""Drives NeMo Gym's model server, which forwards requests to NeMo RL's worker.

A request supplies the beginning of a prompt, as with `nemo_rl`, but in three members of the last reply of the history: `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`. The worker uses the last message that has them, so no other message gets them. Gym's
server expects a message's reasoning as `<think>…</think>` in its text. It refuses unknown members of a request (422: `extra="forbid"` in
`nemo_gym/openai_utils.py`). So these are sent in `metadata.extra_body`, which it unpacks for the engine
(`responses_api_models/vllm_model/app.py`).

The message of a reply has the same members if the server's configuration has `return_token_id_information: true`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.gym import GENERATION, LOG_PROBS, PREFIX, PROMPT
from tokencache.dialects.gym_request import CHAT_MEMBERS
from tokencache.dialects.json_io import FIELDS
from tokencache.dialects.members import OF_STREAMS
from tokencache.dialects.thinking import in_text
from tokencache.engine.drivers.base import ExactPrompt, LastReply
from tokencache.engine.drivers.nemo_rl import NemoDriver

Raw = msgspec.Raw

_NEVER_SENT = frozenset({*OF_STREAMS, PREFIX, "kv_transfer_params"})


class NemoGym(NemoDriver):
    """The driver `nemo-gym`."""

    name = "nemo-gym"
    capacity_route = ""
    how = "the ids on the last assistant's message begin the prompt"
    sends_logprobs = True

    def write(self, call: ChatCall, prompt: ExactPrompt | None) -> bytes:
        """See `Driver.write`."""
        messages = list(call.raw_messages if prompt is None else call.safe_messages())
        if prompt is not None:
            place, start, end = prompt.last_reply.place, prompt.last_reply.start, prompt.last_reply.end
            logprobs = ids.unpack_logprobs(prompt.last_reply.logprobs)[: end - start]
            members = {
                PROMPT: Raw(b"[" + ids.fragment(ids.head(prompt.ids, start)) + b"]"),
                GENERATION: Raw(b"[" + ids.fragment(ids.tail(ids.head(prompt.ids, end), start)) + b"]"),
                LOG_PROBS: Raw(msgspec.json.encode(logprobs)),
            }
            messages[place] = msgspec.json.encode(FIELDS.decode(messages[place]) | members)
        joined = Raw(b"[" + b",".join([in_text(message) for message in messages]) + b"]")
        return msgspec.json.encode(_accepted(call.fields | {"messages": joined}))

    def cannot_supply(self, call: ChatCall, last_reply: LastReply) -> str:
        """See `Driver.cannot_supply`."""
        return super().cannot_supply(call, last_reply) or ("" if last_reply.logprobs else Reason.NO_LOGPROBS)

    def own_request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Driver.own_request`."""
        return _accepted({name: Raw(msgspec.json.encode(value)) for name, value in {**body, **self.pinned}.items()})

    def probe_members(self, question: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.probe_members`."""
        with_ids = {**FIELDS.decode(reply), PROMPT: prompt[:-1], GENERATION: prompt[-1:], LOG_PROBS: [-1.0]}
        return {"messages": [Raw(question), with_ids, Raw(question)]}


def _accepted(fields: dict[str, Raw]) -> dict[str, Any]:
    """Move members that Gym's server does not know into `metadata`, from which it forwards them."""
    unknown = {name: raw for name, raw in fields.items() if name not in CHAT_MEMBERS and name not in _NEVER_SENT and bytes(raw) != b"null"}
    known: dict[str, Any] = {name: raw for name, raw in fields.items() if name in CHAT_MEMBERS}
    if not unknown:
        return known
    metadata = dict(msgspec.json.decode(fields.get("metadata", Raw(b"{}"))) or {})
    arguments = unknown.pop("chat_template_kwargs", None)
    if arguments is not None:
        metadata["chat_template_kwargs"] = bytes(arguments).decode()
    if unknown:
        own = metadata.get("extra_body")
        metadata["extra_body"] = msgspec.json.encode({**(FIELDS.decode(own) if isinstance(own, str) else {}), **unknown}).decode()
    return {**known, "metadata": metadata}
