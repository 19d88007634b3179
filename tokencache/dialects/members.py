"""The members of a request: one row for each, with all that the proxy decides by its name.

The rows are all members that vLLM 0.32 reads (`chat_completion/protocol.py`, `completion/protocol.py`, the fields of `SamplingParams`),
some of earlier versions, and some of OpenAI's API. A test compares them with the lists of vLLM 0.32, so that a new member is found. A
member without a row passes unchanged and is not recorded, and a reply to a request with it is not continued.

For another decision add a column, and at the end of this module the set that is made of it.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal, NamedTuple


class Concern(StrEnum):
    """What a member concerns."""

    DISTRIBUTION = "the distribution that a token is drawn from"
    GRAMMAR = "a grammar, or a tool that must be called"
    REPLACED = "another token in the place of the policy's"
    END = "the end of the reply"
    PROMPT = "the prompt"
    MODEL = "which model"
    FORM = "the client's form of the reply"
    LOGPROBS = "log probabilities of tokens"
    PLACE = "where and when it runs"
    EXTRA = "`vllm_xargs` and the transfer parameters"
    SEARCH = "a search, which is not recorded"
    NOTHING = "nothing: vLLM ignores it"


BENDING = (Concern.DISTRIBUTION, Concern.GRAMMAR, Concern.REPLACED, Concern.END)
"""Such members bend or replace the policy's choice of the next token, or decide where the reply ends. They are recorded with the turn."""


class Kind(StrEnum):
    """How a value is read that may be written in several ways (`chat.scalars`)."""

    WHOLE = "a whole number, or its text"
    COUNT = "a whole number"
    INTEGER = "a whole number without a decimal point"
    NUMBER = "a number, or its text"
    TRUTH = "true or false, or its number"
    IDS = "a list of token ids"
    BIASES = "an object of numbers"
    OPTIONS = "the options of a stream"


class Pin(NamedTuple):
    """The values to which a sampling policy can pin a member (vLLM 0.32, `sampling_params.py`, `SamplingParams._verify_args`)."""

    words: str
    accepts: Callable[[Any], bool]


WHOLE, COUNT, INTEGER, NUMBER, TRUTH, IDS, BIASES, OPTIONS = Kind
ANY: Literal["any"] = "any"
PENALTY = Pin("a number from -2 to 2", lambda v: -2 <= v <= 2)  # noqa: PLR2004


class Member(NamedTuple):
    """What is known of a member.

    Attributes:
        name: its name.
        kind: how its value is read; `None` if it stays as it is written.
        after_cut: the values with which a reply can be continued after a cut (measured on vLLM 0.32): `ANY`, or these. They leave the
            distribution of the next token as it is, or are reduced by what was sampled. Without any, the member is not known to survive.
        pin: the values to which a sampling policy can pin it; `None` if it cannot.
        renders: whether it changes what vLLM renders, besides messages and tools: in `both`, `/tokenize` and chat completions, or if
            `/tokenize` accepts it only as an argument of the template, in `chat`.
        alters_prompt: whether the prompt may not be that of an ordinary call.
        unnamed: whether the plugin refuses it with a prompt that is named by a hash.
        unrecorded: whether it asks for values that are not recorded with a turn, so that a retry is sampled again.
        chat_only: whether text completions do not have it, or have it with another meaning.
        guides: whether an engine makes a constraint of it, or a limit.
        parses: whether the parser of replies reads it.
        shapes_media: whether an engine makes other pixels of an image with it.
        read_inside: whether the proxy reads the members of its value, and the engine gets them as they are written.
        streams: whether only requests for streams have it.
    """

    name: str
    kind: Kind | None = None
    after_cut: tuple[Any, ...] | Literal["any"] = ()
    pin: Pin | None = None
    renders: Literal["", "both", "chat"] = ""
    alters_prompt: bool = False
    unnamed: bool = False
    unrecorded: bool = False
    chat_only: bool = False
    guides: bool = False
    parses: bool = False
    shapes_media: bool = False
    read_inside: bool = False
    streams: bool = False


MEMBERS: Mapping[Concern, tuple[Member, ...]] = {
    Concern.DISTRIBUTION: (
        Member("temperature", NUMBER, ANY, Pin("a number from 0 to 2", lambda v: 0 <= v <= 2)),  # noqa: PLR2004
        Member("top_p", NUMBER, ANY, Pin("a number above 0, at most 1", lambda v: 0 < v <= 1)),
        Member("top_k", WHOLE, ANY, Pin("a whole number; 0 or -1 for all", lambda v: v >= -1)),
        Member("min_p", NUMBER, ANY, Pin("a number from 0 to 1", lambda v: 0 <= v <= 1)),
        Member("frequency_penalty", NUMBER, (None, 0), PENALTY),
        Member("presence_penalty", NUMBER, (None, 0), PENALTY),
        Member("repetition_penalty", NUMBER, ANY, Pin("a number above 0", lambda v: 0 < v < float("inf"))),
        Member("logit_bias", BIASES, ANY),
        Member("allowed_token_ids", IDS, ANY),
        Member("bad_words", None, (None, [])),
        Member("min_tokens", WHOLE, ANY),
        Member("ignore_eos", TRUTH, ANY),
        Member("watermarking"),
        Member("logits_processors", None, (None, [])),
        Member("vllm_xargs", None, ANY, read_inside=True),
        Member("seed", WHOLE, ANY, Pin("a whole number of 64 bits", lambda v: -(2**63) <= v < 2**63)),
        Member("n", WHOLE, (None, 1)),
    ),
    Concern.GRAMMAR: (
        Member("tool_choice", None, (None, "auto", "none"), chat_only=True, guides=True),
        Member("parallel_tool_calls", TRUTH, ANY, chat_only=True, guides=True),
        Member("response_format", None, (None, {"type": "text"}), chat_only=True, guides=True),
        Member("structured_outputs", None, (None,), chat_only=True, guides=True),
        Member("guided_json"),
        Member("guided_regex"),
        Member("guided_choice"),
        Member("guided_grammar"),
        Member("structural_tag"),
    ),
    Concern.REPLACED: (
        Member("thinking_token_budget", INTEGER, ANY),
        Member("trace_decode_token_ids"),
    ),
    Concern.END: (
        Member("max_tokens", WHOLE, ANY, Pin("a whole number from 1", lambda v: v >= 1), chat_only=True),
        Member("max_completion_tokens", WHOLE, ANY, chat_only=True),
        Member("stop", None, (None, [], "")),
        Member("stop_token_ids", IDS, ANY),
        Member("repetition_detection", None, (None,)),
    ),
    Concern.PROMPT: (
        Member("messages", None, ANY, chat_only=True),
        Member("prompt"),
        Member("prompt_embeds"),
        Member("suffix"),
        Member("echo", TRUTH, (None, False), alters_prompt=True, unnamed=True, unrecorded=True, chat_only=True),
        Member("tools", None, ANY, chat_only=True, guides=True),
        Member("chat_template", None, ANY, renders="both", chat_only=True),
        Member("chat_template_kwargs", None, ANY, renders="chat", chat_only=True, guides=True, parses=True, read_inside=True),
        Member("reasoning_effort", None, ANY, renders="chat", chat_only=True, guides=True, parses=True),
        Member("documents", None, ANY, renders="chat", chat_only=True),
        Member("add_generation_prompt", TRUTH, ANY, alters_prompt=True, chat_only=True),
        Member("continue_final_message", TRUTH, (None, False), alters_prompt=True, chat_only=True),
        Member("add_special_tokens", TRUTH, renders="both", chat_only=True),
        Member("truncate_prompt_tokens", WHOLE, alters_prompt=True, unnamed=True),
        Member("truncation_side"),
        Member("media_io_kwargs", chat_only=True, shapes_media=True),
        Member("mm_processor_kwargs", renders="both", chat_only=True, shapes_media=True),
        Member("mm_payload"),
        Member("return_mm_kwargs"),
    ),
    Concern.MODEL: (Member("model", None, ANY),),
    Concern.FORM: (
        Member("stream", TRUTH, ANY, streams=True),
        Member("stream_options", OPTIONS, ANY, read_inside=True, streams=True),
        Member("stream_interval", None, ANY),
        Member("output_kind"),
        Member("include_reasoning", TRUTH, ANY, chat_only=True),
        Member("include_stop_str_in_output", TRUTH, ANY),
        Member("skip_special_tokens", None, ANY),
        Member("spaces_between_special_tokens", None, ANY),
        Member("detokenize"),
        Member("return_token_ids", TRUTH, ANY),
        Member("return_token_offsets"),
        Member("return_tokens_as_token_ids"),
        Member("return_prompt_text", TRUTH, ANY, unrecorded=True, chat_only=True),
        Member("return_weight_versions", TRUTH, ANY, unrecorded=True),
        Member("return_assistant_tokens_mask"),
        Member("output_text_buffer_length"),
    ),
    Concern.LOGPROBS: (
        Member("logprobs", TRUTH, ANY, chat_only=True),
        Member("top_logprobs", COUNT, ANY, chat_only=True),
        Member("prompt_logprobs", COUNT, (None,), unrecorded=True),
        Member("logprob_token_ids"),
        Member("prompt_logprob_token_ids"),
        Member("prompt_logprob_start"),
        Member("flat_logprobs"),
    ),
    Concern.PLACE: (
        Member("user", None, ANY),
        Member("priority", None, ANY),
        Member("request_id", None, ANY),
        Member("session_id"),
        Member("cache_salt", None, ANY),
        Member("skip_reading_prefix_cache"),
        Member("kv_transfer_params", None, ANY, read_inside=True),
        Member("ec_transfer_params"),
        Member("routed_experts_prompt_start"),
        Member("skip_clone"),
    ),
    Concern.EXTRA: (Member("extra_args"), Member("nvext", read_inside=True)),
    Concern.SEARCH: (
        Member("use_beam_search", TRUTH, (None, False)),
        Member("length_penalty", NUMBER, (None, 1)),
    ),
    Concern.NOTHING: (
        Member("best_of", None, (None, 1)),
        Member("function_call", None, (None,), chat_only=True),
        Member("functions", None, (None, []), chat_only=True),
        Member("metadata", None, ANY),
        Member("prompt_cache_key", None, ANY),
        Member("safety_identifier", None, ANY),
        Member("service_tier", None, ANY),
        Member("store", None, ANY),
        Member("verbosity", None, ANY),
    ),
}

ROWS = tuple(row for rows in MEMBERS.values() for row in rows)


def _named(column: str) -> tuple[str, ...]:
    return tuple(row.name for row in ROWS if getattr(row, column))


RECORDED = tuple(row.name for concern in BENDING for row in MEMBERS[concern])
KINDS: Mapping[str, Kind] = {row.name: row.kind for row in ROWS if row.kind is not None}
PINS: Mapping[str, Pin] = {row.name: row.pin for row in ROWS if row.pin is not None}
SURVIVING = frozenset(row.name for row in ROWS if row.after_cut == ANY)
HARMLESS: Mapping[str, tuple[Any, ...]] = {row.name: row.after_cut for row in ROWS if row.after_cut and row.after_cut != ANY}
RENDERED_BY_BOTH = tuple(row.name for row in ROWS if row.renders == "both")
RENDERED_BY_CHAT = tuple(row.name for row in ROWS if row.renders == "chat")
"""The order of `RENDERED_BY_BOTH` and `RENDERED_BY_CHAT` is that of the digests that are stored (`chat.rendering.scope_of`)."""
ALTERING_PROMPT = frozenset(_named("alters_prompt"))
UNNAMED, UNRECORDED = _named("unnamed"), _named("unrecorded")
CHAT_ONLY = frozenset(_named("chat_only"))
GUIDING, PARSED, SHAPING_MEDIA = _named("guides"), _named("parses"), _named("shapes_media")
READ_INSIDE, OF_STREAMS = _named("read_inside"), _named("streams")
LIMITS = ("max_completion_tokens", "max_tokens")
"""The members with the limit of a reply, in tokens; vLLM uses the first that is a number (0.32, `chat_completion/protocol.py`)."""
