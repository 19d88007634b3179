"""Makes the ids of the prompt from the messages of a request, as vLLM does.

vLLM 0.32 changes messages and tools before it passes them to the chat template (`renderers/chat_utils.py`, `renderers/hf.py`). It

* joins the text parts of list content with newlines, without empty ones, and makes null content the empty string;
* also passes `reasoning` to the template as `reasoning_content`;
* reads the arguments of old calls as JSON, so that the template writes them again. Arguments that are not a JSON object become `{}` (older
  releases returned 400, for this and every later turn: `strict_arguments`);
* gives tools fixed keys: unknown ones are dropped, `description` and `parameters` are present even if null;
* turns `developer` into `system`, and then moves all system messages into one at the front;
* drops the line `x-anthropic-billing-header…` that Claude Code puts into its system prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from tokencache.testing.errors import RefusalResponse, senseless
from tokencache.testing.tokenizer import SimTokenizer

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the template writes for an image."""
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""Types of parts that are text for the engine, with the member that it reads (vLLM 0.32, `renderers/chat_utils.py`)."""
MEDIA_PARTS = frozenset({
    "image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds",
    "prompt_embeds",
})  # fmt: skip
_BILLING = "x-anthropic-billing-header"
_CONTINUE = "CONTINUE_HERE_b2f1"
"""Marks the end of the final message, where `continue_final_message` cuts the rendering."""


def prompt_ids(
    tokenizer: SimTokenizer,
    body: Mapping[str, Any],
    template_arguments: Mapping[str, Any],
    *,
    model: str,
    strict_arguments: bool = False,
    takes_images: bool = False,
) -> list[int]:
    """Render and tokenize the conversation in a request's `body`. Images have one token each.

    Raises:
        RefusalResponse: vLLM answers 400.
    """
    if body.get("chat_template") is not None or template_arguments.get("chat_template") is not None:
        raise RefusalResponse(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    messages = _conversation(body["messages"], model=model, strict_arguments=strict_arguments, takes_images=takes_images)
    if not messages:
        raise senseless("Cannot apply chat template to an empty conversation. Provide at least one message.")
    tools = [_tool(tool) for tool in body.get("tools") or []] or None
    continues = bool(body.get("continue_final_message"))
    if continues:
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_CONTINUE}"}]
    prompt_arguments = {key: value for key, value in template_arguments.items() if key != "add_generation_prompt"}
    generation = bool(body.get("add_generation_prompt", True))
    try:
        text = tokenizer.render(messages, tools, generation, **prompt_arguments)
    except (TemplateError, TypeError) as error:
        raise RefusalResponse(str(error)) from error
    if continues:
        text = text[: text.rindex(_CONTINUE)]
    return tokenizer.encode(text)


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of messages that are not text."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") not in TEXT_PARTS
    ]


def _conversation(messages: Sequence[Mapping[str, Any]], *, model: str, strict_arguments: bool, takes_images: bool) -> list[dict[str, Any]]:
    if any(part.get("type") in MEDIA_PARTS for part in media_parts(messages)) and not takes_images:
        raise senseless(f"{model} is not a multimodal model")
    conversation = [_message(message, strict_arguments=strict_arguments) for message in messages]
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    for message in conversation:
        if message["role"] == "developer":
            message["role"] = "system"
    system = [message["content"] for message in conversation if message["role"] == "system" and message["content"]]
    rest = [message for message in conversation if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest]


def _message(message: Mapping[str, Any], *, strict_arguments: bool) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [_part_text(part) for part in content or []]
    if role == "system":
        parts = [part.partition("\n")[2] if part.startswith(_BILLING) else part for part in parts]
        parts = [part for part in parts if part] or [""]
    joint = "" if media_parts([message]) else "\n"  # with images, the template gets the parts, and joins them itself
    result: dict[str, Any] = {"role": role, "content": joint.join(filter(None, parts))}
    if role == "assistant":
        reasoning = message.get("reasoning") if message.get("reasoning") is not None else message.get("reasoning_content")
        if reasoning is not None:
            result |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if message.get("tool_calls"):
            result["tool_calls"] = [_call(call, strict_arguments=strict_arguments) for call in message["tool_calls"]]
    if role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    return result


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind in TEXT_PARTS:
        return part.get(TEXT_PARTS[kind]) or ""
    if kind in MEDIA_PARTS:
        return IMAGE
    supported = ", ".join(sorted({*TEXT_PARTS, *MEDIA_PARTS}))
    raise senseless(f"Unsupported chat content part type: {kind!r}. Supported types: {supported}.", "type", kind)


def _call(call: Mapping[str, Any], *, strict_arguments: bool) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise senseless("chat completions only support assistant tool_calls of type 'function'.", "tool_calls")
    arguments: Any = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise senseless("ChatCompletionMessageFunctionToolCallParam.function.arguments\n  Input should be a valid string")
    try:
        arguments = json.loads(arguments)
    except ValueError as error:
        if strict_arguments:
            raise RefusalResponse(str(error)) from error
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    shown = {key: function.get(key) for key in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}
