"""Reads and validates the ids that a request supplies, and removes them from the request.

A request may have one of two members:

`prompt_token_ids`           the whole prompt, in `kv_transfer_params`, as vLLM 0.27 and later accept it
                             (0.32: `vllm/renderers/online_renderer.py::_reused_prompt_token_ids`)
`required_prefix_token_ids`  the exact ids up to the end of the last assistant message, as NeMo RL's worker accepts them: at the top level
                             of the body; in `kv_transfer_params` or `vllm_xargs` for dialects that drop unknown members

The ids are removed, so that no connector and no sampler gets them, and so that later prompts of the same request (the tool loops of
Responses) are rendered. A request with media is refused. vLLM 0.32 silently ignores the ids in that case.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

PROMPT = "prompt_token_ids"
PREFIX = "required_prefix_token_ids"
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
_MEDIA_MEMBERS = frozenset(
    {
        *("image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds"),
    }
)
"""A part with one of these members is media, whatever its type is (vLLM 0.32, `vllm/renderers/chat_utils.py`)."""


class InvalidIdsError(ValueError):
    """The supplied ids cannot be used; the client gets a 400. `parameter` is the wrong member."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class SuppliedIds(NamedTuple):
    """Ids that are the whole prompt, or (`whole` is false) its beginning up to the end of the last reply."""

    ids: list[int]
    whole: bool
    parameter: str


def take(request: Any) -> SuppliedIds | None:
    """Remove supplied ids from a request and return them.

    Args:
        request: any request object of vLLM; unknown members are in its `model_extra`.

    Returns:
        The ids; `None` if the request has none, or an empty prefix.

    Raises:
        InvalidIdsError: the ids are not a list of non-negative integers, two members contradict each other, or the request has `echo`.
    """
    places = {"": getattr(request, "model_extra", None)}
    places |= {name: getattr(request, name, None) for name in ("kv_transfer_params", "vllm_xargs")}
    prompt = places["kv_transfer_params"].pop(PROMPT, None) if isinstance(places["kv_transfer_params"], dict) else None
    found = [
        (f"{name}.{PREFIX}".lstrip("."), value.pop(PREFIX)) for name, value in places.items() if isinstance(value, dict) and PREFIX in value
    ]
    given = [(parameter, ids) for parameter, ids in found if ids is not None]
    if prompt is not None:
        parameter = f"kv_transfer_params.{PROMPT}"
        if given:
            raise InvalidIdsError(f"`{parameter}` and `{given[0][0]}` cannot both be given.", given[0][0])
        _validate(prompt, parameter, "a non-empty list")
        if getattr(request, "echo", False):
            raise InvalidIdsError(f"`{parameter}` cannot be used with `echo`: no message is rendered that could be echoed.", parameter)
        return SuppliedIds(prompt, whole=True, parameter=parameter)
    if not given or given[0][1] == []:
        return None
    parameter, prefix = given[0]
    _validate(prefix, parameter, "a list")
    if any(other != prefix for _, other in given):
        raise InvalidIdsError(f"`{parameter}` is given twice with different ids.", parameter)
    return SuppliedIds(prefix, whole=False, parameter=parameter)


def _validate(ids: Any, parameter: str, what: str) -> None:
    # bool is a subclass of int, hence the exact type
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise InvalidIdsError(f"`{parameter}` must be {what} of non-negative integers.", parameter)


def check_range(supplied: SuppliedIds, vocabulary: int, max_model_len: int) -> None:
    """Check supplied ids against the limits of the model.

    Args:
        supplied: the ids.
        vocabulary: the size of the vocabulary; all ids must be below it.
        max_model_len: limit of prompt and completion together, in tokens; at least one must remain for the completion.

    Raises:
        InvalidIdsError: an id is out of vocabulary, or there are too many.
    """
    if max(supplied.ids) >= vocabulary:
        raise InvalidIdsError(f"Token id {max(supplied.ids)} of `{supplied.parameter}` is out of vocabulary.", supplied.parameter)
    if len(supplied.ids) >= max_model_len:
        message = f"`{supplied.parameter}` has {len(supplied.ids)} tokens; this model's maximum context length is {max_model_len} tokens."
        raise InvalidIdsError(message, supplied.parameter)


def plain(value: Any) -> Any:
    """Copy a validated message into dicts and lists, so that pydantic's one-shot iterators can be read more than once."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return [plain(item) for item in value]
    return value


def has_media(messages: list[Any]) -> bool:
    """Whether any content part of plain messages is not text."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(_is_media(part) for content in contents if isinstance(content, list) for part in content)


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and (not _MEDIA_MEMBERS.isdisjoint(part) or part.get("type", "text") not in _TEXT_PARTS)
