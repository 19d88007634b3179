"""The driver for vLLM: stock from 0.27 on, and 0.20 to 0.26 with the plugin that comes along (`tokencache.vllm_plugin`).

`kv_transfer_params: {"prompt_token_ids": [...]}` on chat completions replaces the whole prompt (vLLM PR 48145;
`renderers/online_renderer.py::_reused_prompt_token_ids`): rendering and tokenization are skipped, everything else
(tool and reasoning parsers, streaming, structured output) runs as ever, and no KV connector is needed. Older versions
and the Rust frontend ignore the member without a word: the probe finds out, and every answer's echo is compared.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tokencache.dialects.chat.call import ChatCall
from tokencache.engine.drivers.base import Exact, Head
from tokencache.engine.segments import Written, written

if TYPE_CHECKING:
    from tokencache.engine.drivers.text_prompts import TokenPrompts

Raw = msgspec.Raw

NOT_WHOLE = ("stream", "stream_options")
"""Members that only a request for a stream has."""
_TRUE = Raw(b"true")
_ZERO = Raw(b"0")
_NULL = Raw(b"null")
_ENCODER = msgspec.json.Encoder()
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


class Vllm:
    """See `driver.Driver`."""

    name = "vllm"
    how = "kv_transfer_params.prompt_token_ids is the prompt"
    adds_tail = False
    says_logprobs = False
    pinned: Mapping[str, Any] = {}
    detour: "TokenPrompts | None" = None

    def __init__(self, *, streams: bool = True) -> None:
        """Set up a driver; without `streams` all replies are asked for whole."""
        self.streams = streams

    def write(self, call: ChatCall, exact: Exact | None) -> bytes | Written:
        """See `Driver.write`."""
        fields = members_with_ids(call)
        if not self.streams:
            fields = {name: value for name, value in fields.items() if name not in NOT_WHOLE}
        if exact is None:
            return _ENCODER.encode(fields)
        if call.malformed:
            fields["messages"] = Raw(b"[" + b",".join(call.safe_messages()) + b"]")
        transfer = fields.pop("kv_transfer_params", _NULL)
        others = _FIELDS.decode(transfer) if bytes(transfer) != b"null" else {}
        body = memoryview(_ENCODER.encode(fields))
        inner = _ENCODER.encode(others)[:-1] + (b"," if others else b"")
        return written(body[:1], body[1:-1], b',"kv_transfer_params":' + inner + b'"prompt_token_ids":[', *exact.fragment, b"]}}")

    def read(self, body: bytes) -> bytes:
        """See `Driver.read`."""
        return body

    def unsayable(self, call: ChatCall, head: Head) -> str:
        """See `Driver.unsayable`: a whole prompt can always be said."""
        del call, head
        return ""

    def question(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `Driver.question`."""
        return dict(body)

    def supplied(self, asked: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.supplied`."""
        del reply
        return {"messages": [Raw(asked)], "kv_transfer_params": {"prompt_token_ids": prompt}}


def members_with_ids(call: ChatCall) -> dict[str, Raw]:
    """The members of a request as they go to an engine: ids, log probabilities and reasoning are always asked for.

    `include_reasoning: false` would silence the ids (vLLM 0.26 and later). Weight versions are asked for, too, unless that would
    be refused (beam search, 0.33). Everything else stays as the harness sent it.
    """
    fields = {**call.fields, "return_token_ids": _TRUE}
    if call.shows_logprobs or bytes(call.fields.get("top_logprobs", _ZERO)) in {b"0", b"null"}:
        fields["logprobs"] = _TRUE  # else the engine's to refuse: `top_logprobs` without `logprobs`
    if not call.shows_reasoning:
        fields["include_reasoning"] = _TRUE
    if bytes(fields.get("use_beam_search", _NULL)) != b"true":
        fields["return_weight_versions"] = _TRUE
    return fields
