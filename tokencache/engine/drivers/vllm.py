"""Drives vLLM: 0.27 and later without changes, 0.20 to 0.26 with the plugin `tokencache_vllm`.

`kv_transfer_params: {"prompt_token_ids": [...]}` in a chat completion replaces the whole prompt (vLLM PR 48145;
`renderers/online_renderer.py::_reused_prompt_token_ids`). vLLM then skips rendering and tokenization, and does everything else as usual:
tool and reasoning parsers, streaming, structured output. It needs no KV connector. Older versions and the Rust frontend ignore the member
silently. So the probe tests it, and the proxy compares the ids that every reply reports.

Requests with images are different: vLLM ignores the member there. With the plugin they have another member (`engine.images`). Without it
they go to another route (`image_prompts`). With the plugin, a prompt without images may be named by a hash (`engine.prefixes`).
"""

from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.media import Places
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.grammar import is_bound, may_be_bound
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_members
from tokencache.dialects.json_io import FIELDS, NULL, TRUE, value_of
from tokencache.dialects.stream_usage import with_usage
from tokencache.engine.connections import Segments
from tokencache.engine.derender import ANY_MESSAGES, Derender
from tokencache.engine.drivers.base import Driver, EngineRequest, ExactPrompt, Target
from tokencache.engine.drivers.bound_replies import BoundReplies
from tokencache.engine.drivers.image_prompts import ImagePrompts
from tokencache.engine.generate import render_request
from tokencache.engine.image_names import with_names
from tokencache.engine.images import PLUGIN_PROMPT, ranges_of
from tokencache.engine.prefixes import MEMBER as PREFIX
from tokencache.engine.prefixes import PromptName
from tokencache.engine.upstream import Upstream, segmented_body
from tokencache.errors import EngineError

Raw = msgspec.Raw

_NEED_LOGPROBS = ("top_logprobs", "logprob_token_ids")
"""Members that vLLM accepts only with `logprobs`."""


class Vllm(Driver):
    """The driver `vllm`."""

    name = "vllm"
    skips_experts = True
    images = True
    prefixes = True
    generates = True
    ranks = True
    how = "kv_transfer_params.prompt_token_ids is the prompt"
    ignored_hint = "if a server in front of vLLM replaces kv_transfer_params, as disaggregated prefill does, use --engine generate"

    def __init__(self, *, streams: bool = True, parser: Upstream | None = None) -> None:
        """Create a driver; without `streams` it requests only whole replies. `parser` derenders; if it is `None`, the engine does."""
        self.streams = streams
        self.derender = Derender(parser) if streams else None
        self._image_prompts = ImagePrompts()
        self._bound_replies = BoundReplies(Derender(parser))

    async def request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        """See `Driver.request`."""
        if call.shows_reasoning:  # then a grammar binds the reply as it would a direct call's
            return await self._chat_request(call, prompt, target)
        if target.generates and not call.media and may_be_bound(call.fields):
            try:
                bound = await self._bound_replies.request(call, whole_members(members_with_ids(call)), prompt, target)
            except EngineError as why:
                if why.passing:
                    raise
            else:
                return bound or await self._chat_request(call, prompt, target)
        made = await self._chat_request(call, prompt, target)
        return msgspec.structs.replace(made, late_grammar=True) if binds_late(call) else made

    async def _chat_request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        if target.prompt is not None:
            return EngineRequest(target.path, self._write_named(call, target.prompt), named=True)
        if prompt is None or not call.media or target.images.route != "generate":
            return EngineRequest(target.path, self.write(with_names(call, target.names) if target.names else call, prompt))
        made = await self._image_prompts.request(call, whole_members(members_with_ids(call)), prompt, target)
        return made or EngineRequest(target.path, self.write(with_names(call, target.names), None), not_exact=Reason.NOT_FOR_GENERATE)

    async def places(self, call: ChatCall, prompt: bytes, target: Target) -> Places | None:
        """See `Driver.places`."""
        if target.images.route != "generate":
            return None
        rendered = await render_request(target.upstream, whole_members(call.safe_fields()), target.headers)
        return rendered.places if ids.pack(rendered.ids) == prompt else None

    def _members(self, call: ChatCall) -> dict[str, Raw]:
        fields = members_with_ids(call)
        if not self.streams:
            return whole_members(fields)
        return with_usage(fields) if call.stream else fields

    def _write_named(self, call: ChatCall, name: PromptName) -> bytes:
        """Write a request that names its prompt. If the engine does not render, one message stands for all (`engine.prefixes`)."""
        fields: dict[str, Any] = self._members(call)
        if name.digest:
            fields["messages"] = ANY_MESSAGES
        named = name.member(call.call_count, packed=not (call.shows_ids or call.shows_logprobs))
        fields["kv_transfer_params"] = {**_others(fields), PREFIX: named}
        return msgspec.json.encode(fields)

    def write(self, call: ChatCall, prompt: ExactPrompt | None) -> bytes | Segments:
        """See `Driver.write`."""
        fields = self._members(call)
        if prompt is None:
            return msgspec.json.encode(fields)
        messages, others = fields.pop("messages"), _others(fields)  # the messages of a long history are not copied
        if call.malformed:
            messages = Raw(b"[" + b",".join(call.safe_messages()) + b"]")
        inner, end = b',"kv_transfer_params":' + msgspec.json.encode(others)[:-1] + (b"," if others else b""), b"]}}"
        if call.media:
            known = msgspec.json.encode({"ranges": ranges_of(prompt.media), "sampled": prompt.sampled})[:-1]
            inner, end = inner + b'"%s":%s,"ids":[' % (PLUGIN_PROMPT.encode(), known), b"]}}}"
        else:
            inner += b'"prompt_token_ids":['
        members = msgspec.json.encode(fields)[1:-1]
        return segmented_body(b'{"messages":', memoryview(messages), b"," + members + inner, *prompt.fragment.pieces, end)

    def probe_members(self, question: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.probe_members`."""
        del reply
        return {"messages": [Raw(question)], "kv_transfer_params": {"prompt_token_ids": prompt}}


def _others(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Take `kv_transfer_params` out of the members of a request; return its members."""
    transfer = fields.pop("kv_transfer_params", NULL)
    return FIELDS.decode(transfer) if bytes(transfer) != b"null" else {}


def binds_late(call: ChatCall) -> bool:
    """Whether a grammar binds the reply to `members_with_ids` only after its thought, and a direct call's from the first token."""
    return not call.shows_reasoning and is_bound(call.fields)


def members_with_ids(call: ChatCall) -> dict[str, Raw]:
    """Return the members of a request for the engine, which always request ids, log probabilities and reasoning.

    With `include_reasoning: false` vLLM would leave out the ids (0.26 and later). The request also asks for weight versions. Everything
    else stays as the harness sent it.
    """
    fields = {**call.fields, "return_token_ids": TRUE, "return_weight_versions": TRUE}
    if call.shows_logprobs or not any(map(value_of, filter(None, map(call.fields.get, _NEED_LOGPROBS)))):
        fields["logprobs"] = TRUE  # otherwise leave it to the engine to refuse them
    if not call.shows_reasoning:
        fields["include_reasoning"] = TRUE
    return fields
