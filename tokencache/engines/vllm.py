"""The driver for stock vLLM 0.27 and later.

`kv_transfer_params: {"prompt_token_ids": [...]}` on chat completions replaces the whole prompt (vLLM PR 48145;
`renderers/online_renderer.py::_reused_prompt_token_ids`): rendering and tokenization are skipped, everything else
(tool and reasoning parsers, streaming, structured output) runs as ever, and no KV connector is needed. Older versions
and the Rust frontend ignore the member without a word: the probe finds out, and every answer's echo is compared.
"""

import msgspec

from tokencache.dialects.chat.call import ChatCall

Raw = msgspec.Raw

_TRUE = Raw(b"true")
_ZERO = Raw(b"0")
_NULL = Raw(b"null")
_ENCODER = msgspec.json.Encoder()
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


def chat_body(call: ChatCall, prompt: bytes | None) -> bytes:
    """Write the request for the engine.

    `prompt` is the exact prompt as a JSON fragment (`b"1,2,3"`), or `None` to let the engine render. Ids, log
    probabilities and reasoning are always asked for: `include_reasoning: false` would silence the ids (vLLM 0.26 and
    later); so are weight versions, unless that would be refused (beam search, 0.33). Everything else stays as the harness sent it.
    """
    fields = {**call.fields, "return_token_ids": _TRUE}
    if call.shows_logprobs or bytes(call.fields.get("top_logprobs", _ZERO)) in {b"0", b"null"}:
        fields["logprobs"] = _TRUE  # else the engine's to refuse: `top_logprobs` without `logprobs`
    if not call.shows_reasoning:
        fields["include_reasoning"] = _TRUE
    if bytes(fields.get("use_beam_search", _NULL)) != b"true":
        fields["return_weight_versions"] = _TRUE
    if prompt is None:
        return _ENCODER.encode(fields)
    if call.malformed:
        fields["messages"] = Raw(b"[" + b",".join(call.safe_messages()) + b"]")
    transfer = fields.pop("kv_transfer_params", _NULL)
    others = _FIELDS.decode(transfer) if bytes(transfer) != b"null" else {}
    body = memoryview(_ENCODER.encode(fields))[:-1]  # what follows is long and copied once
    inner = _ENCODER.encode(others)[:-1] + (b"," if others else b"")
    return b"".join((body, b',"kv_transfer_params":', inner, b'"prompt_token_ids":[', prompt, b"]}}"))


def echo_agrees(echo: bytes, prompt: bytes) -> bool:
    """Compare the engine's raw JSON list of prompt ids with the fragment that was sent, without reading a single id."""
    return len(echo) == len(prompt) + 2 and echo.startswith(b"[") and echo.startswith(prompt, 1)
