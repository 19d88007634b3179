"""Decides for each member of a request whether it bends or replaces the policy's choice of the next token.

`RECORDED` names the members that do: such a member changes the distribution that a token is drawn from, puts another token in its place,
or decides where the reply ends. They are recorded with the turn, as they were sent. `OTHERS` names the rest of the members that vLLM reads
(0.20 to 0.32: `chat_completion/protocol.py`, `completion/protocol.py`, the fields of `SamplingParams`), by what they concern. A test
compares both with the lists of vLLM 0.32, so that a new member is found.

What no member shows: the engine's own defaults (`--generation-config`, `--override-generation-config`, a watermark), its own logits
processors (`--logits-processors`), and a grammar for all tool calls (`--tool-strict-level`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects.json_io import member, value_of

RECORDED = (
    # The distribution
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "watermarking", "logits_processors", "vllm_xargs", "seed", "n",
    # A grammar, or a tool that must be called
    "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag",
    # Another token in the place of the policy's
    "thinking_token_budget", "trace_decode_token_ids",
    # The end of the reply
    "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "repetition_detection",
)  # fmt: skip
"""Members that are recorded with the turn as its sampling parameters."""

STRICT_TOOLS = "strict_tools"
"""The name under which the tools with `strict` are recorded: a grammar forces the arguments of their calls (vLLM 0.32)."""

BEAM_SEARCH = "beam-search"
"""What a reply that was selected among several is called in incidents."""

OTHERS: Mapping[str, tuple[str, ...]] = {
    "the prompt": (
        "messages", "prompt", "prompt_embeds", "suffix", "echo", "tools", "documents", "chat_template", "chat_template_kwargs",
        "reasoning_effort", "add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens",
        "truncation_side", "media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs",
    ),
    "which model": ("model",),
    "the client's form of the reply": (
        "stream", "stream_options", "stream_interval", "output_kind", "include_reasoning", "include_stop_str_in_output",
        "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "return_token_ids", "return_token_offsets",
        "return_tokens_as_token_ids", "return_prompt_text", "return_weight_versions", "return_assistant_tokens_mask",
        "output_text_buffer_length",
    ),
    "log probabilities of tokens": (
        "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start",
        "flat_logprobs",
    ),
    "where and when it runs": (
        "user", "priority", "request_id", "session_id", "cache_salt", "skip_reading_prefix_cache", "kv_transfer_params",
        "ec_transfer_params", "routed_experts_prompt_start", "skip_clone",
    ),
    "`vllm_xargs` and the transfer parameters": ("extra_args",),
    "a search, which is not recorded": ("use_beam_search", "length_penalty"),
}  # fmt: skip
"""What the other members of vLLM concern → their names."""


def recorded(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return the members of a request (raw) that bend or replace the choice, with their values, and the names of strict tools."""
    found = {name: value_of(fields[name]) for name in RECORDED if name in fields}
    if b'"strict"' in bytes(fields.get("tools", b"")):
        tools = value_of(fields["tools"])
        strict = [name for tool in tools if isinstance(tool, dict) and (name := _strict(tool))] if isinstance(tools, list) else []
        if strict:
            found[STRICT_TOOLS] = strict
    return found


def _strict(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool with `strict`; `""` for any other."""
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) and function.get("strict") is True else ""


def is_search(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether a request selects its reply among several (beam search): none of its tokens is a sample of the policy.

    Raises:
        HarnessError: the member has the wrong type.
    """
    return bool(member(fields, "use_beam_search", (bool,), False))
