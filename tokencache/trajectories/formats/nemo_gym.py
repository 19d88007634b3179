"""Writes rollouts for NeMo Gym, as it passes them on to NeMo RL (format `nemo-gym`).

    {"session", "complete", "incidents", "figures",
     "responses": [{"responses_create_params": {"input", "tools", "model", …}, "response": {"output": [...], …},
                    "messages": [...], "tokencache": {labels}}],
     "untrainable": [the same, for sequences in which nothing can be trained]}

There is one response for each sequence. Its `output` holds the answers of the model and the messages between them, as items of the
Responses API: `reasoning`, `message`, `function_call`, `function_call_output`. The last item of each answer has `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`. `messages` is the same conversation as chat messages; there the assistant messages have
these three members.

NeMo RL walks the output and requires that the prompt of an item begins with all tokens before it
(`_postprocess_nemo_gym_to_nemo_rl_result`). New tokens of the prompt get mask 0, the generation gets mask 1. So tokens that must not be
trained get no item: an answer without log probabilities, or one that another sequence trains, is part of the prompt of the next item.
An answer within which ids were forced (`core.forced`) has an item for each part between them.
NeMo RL refuses a response in which nothing was generated. Such responses are therefore in `untrainable`. `reward` is that of the
sequence, otherwise of the session. If none was given, it is missing, and the verifier adds it; a missing reward is not 0. Those of an
invalid rollout are in `untrainable`, too, with `mask_sample`, `failure_kind` and `failure_reason`, and without a reward.

The URL of an image is `media:<sha256>`: the bytes are in the files of `tokencache media`.

Sources: nemo-gym 0.7.0, `nemo_gym/openai_utils.py` (`TokenIDLogProbMixin`, `NeMoGymResponse` and its items,
`NeMoGymResponseCreateParamsNonStreaming`, `NeMoGymChatCompletionMessageParam`), `base_resources_server.py` (`BaseVerifyRequest`,
`BaseVerifyResponse`),
`responses_converter.py` (which item carries the tokens); NVIDIA-NeMo/RL at 00420a1, `nemo_rl/environments/nemo_gym.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokencache.core.lineage import TokenSequence
from tokencache.core.media import REFERENCE
from tokencache.core.messages import Message
from tokencache.dialects.thinking import split_text
from tokencache.trajectories.formats.conversation import (
    TurnMessages,
    chat_content,
    exchanges,
    parts_of,
    sampled,
    tools_of,
    without_messages,
)
from tokencache.trajectories.formats.rows import ExportedRow, Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Sampling parameters of chat completions that the Responses API has too, and their names there."""


def nemo_gym(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout as results of NeMo Gym."""
    rows = rows_of(rollout)
    return {
        **session_object(rollout),
        "responses": [_response(rollout, row) for row in rows if row.sequence.trainable],
        "untrainable": [_response(rollout, row) for row in rows if not row.sequence.trainable],
    }


def read_nemo_gym(row: Mapping[str, Any]) -> list[ExportedRow]:
    """Read the labels of one row back: its tokens are spread over messages."""
    return [ExportedRow(row["tokencache"])]


def _response(rollout: Rollout, row: Row) -> dict[str, Any]:
    sequence = row.sequence
    found = exchanges(sequence, rollout.contexts)
    tools = [_tool(tool) for tool in tools_of(sequence, rollout.contexts)]
    first, last = sequence.turns[0].turn, sequence.turns[-1].turn
    asked = {_SAMPLING[name]: value for name, value in first.sampling.items() if name in _SAMPLING and value is not None}
    cut = row.ending == "length"
    return {
        "responses_create_params": {"input": _items(found[0].messages or (), sequence.id), "tools": tools, "model": first.model, **asked},
        "response": {
            "id": f"resp_{sequence.id}",
            "object": "response",
            "created_at": first.created,
            "model": last.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(sequence, found),
            "tools": tools,
            # A response must have these. The values of the request are not recorded, so these are the defaults of the API.
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
        "messages": _messages(sequence, found),
        **({} if row.reward is None else {"reward": row.reward}),
        **_failure(rollout),
        "tokencache": {**row.labels, "wordless": without_messages(found)},
    }


def _failure(rollout: Rollout) -> dict[str, Any]:
    """Return the members that say that a result is no measurement of the policy; none if it is one. Gym's own kinds have other names."""
    if rollout.valid:
        return {}
    kind = "incomplete" if rollout.outcome.ok else rollout.outcome.kind.replace("-", "_")
    return {"mask_sample": True, "failure_kind": f"tokencache:{kind}", "failure_reason": rollout.outcome.detail or kind}


def _output(sequence: TokenSequence, found: list[TurnMessages]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for place, exchange in enumerate(found):
        if place:
            items += _items(exchange.messages or (), exchange.turn.id)
        answer, tokens = _answer(exchange.turn.served, exchange.turn.id), _tokens(sequence, exchange)
        while len(answer) < len(tokens):
            answer.append(_text_item("", f"{exchange.turn.id}_{len(answer)}"))
        wordless = len(answer) - len(tokens)
        items += answer[:wordless]
        items += ({**item, **own} for item, own in zip(answer[wordless:], tokens, strict=True))
    return items


def _messages(sequence: TokenSequence, found: list[TurnMessages]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for exchange in found:
        messages += (written for message in exchange.messages or () for written in _chats(message))
        *first, last = _tokens(sequence, exchange) or [{}]
        messages += ({"role": "assistant", "content": "", **own} for own in first)
        messages.append({**_chat(exchange.turn.served), **last})
    return messages


def _tokens(sequence: TokenSequence, exchange: TurnMessages) -> list[dict[str, Any]]:
    """Return the members that make items trainable, for each item; none if there is nothing to train."""
    return [
        {"prompt_token_ids": prompt, "generation_token_ids": completion, "generation_log_probs": logprobs}
        for prompt, completion, logprobs in sampled(sequence, exchange.span).trained_parts()
    ]


def _items(messages: Iterable[Message], name: str) -> list[dict[str, Any]]:
    """Write messages as items of the Responses API. `name` is the prefix of item ids."""
    items: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message.role == "assistant":
            items += _answer(message, f"{name}_{place}")
        elif message.role == "tool":
            items.append({"type": "function_call_output", "call_id": message.answers or "", "output": _content(message)})
        else:
            items.append({"type": "message", "role": message.role, "content": _content(message)})
    return items


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Write the content of a message as the Responses API has it: a text, or parts if it has images."""
    return [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": REFERENCE + part.sha256, "detail": "auto"}
        for part in parts_of(message)
    ] or (message.content or "")


def _answer(message: Message, name: str) -> list[dict[str, Any]]:
    """Write an assistant message as one or more items. At least one, because the last item carries the tokens.

    Thinking that the engine left in the text becomes a reasoning item, as in the converter of NeMo Gym: NeMo RL treats a tag in the text of
    a message as malformed thinking (`nemo_rl/environments/nemo_gym.py`, `_detect_invalid_tool_call_and_malformed_thinking`).
    """
    items: list[dict[str, Any]] = []
    thought, spoken = (message.reasoning, message.content or "") if message.reasoning else split_text(message.content or "")
    if thought:
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [{"type": "summary_text", "text": thought}]})
    if spoken or not (items or message.calls):
        items.append(_text_item(spoken, name))
    items += (
        {"type": "function_call", "id": call.id, "call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        for call in message.calls
    )
    return items


def _text_item(text: str, name: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": content}


def _chats(message: Message) -> list[dict[str, Any]]:
    """Write a message as messages of chat completions: the images of a tool's result follow in a user's message.

    NeMo Gym's class of tool messages has only texts (`NeMoGymChatCompletionToolMessageParam`).
    """
    content = chat_content(message)
    if message.role != "tool" or isinstance(content, str):
        return [_chat(message)]
    texts = [part for part in content if part["type"] == "text"]
    images = [part for part in content if part["type"] != "text"]
    return [{**_chat(message), "content": texts or ""}, {"role": "user", "content": images}]


def _chat(message: Message) -> dict[str, Any]:
    """Write a message as one of chat completions."""
    written: dict[str, Any] = {"role": message.role, "content": chat_content(message)}
    if message.role == "assistant":
        written["content"] = message.content
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        if message.calls:
            written["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
            ]
    elif message.role == "tool":
        written["tool_call_id"] = message.answers or ""
    if message.name:
        written["name"] = message.name
    return written


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Turn a tool of chat completions into one of the Responses API, which has no nested object."""
    kind = tool.get("type", "function")
    flat = {"type": kind, **(tool.get(kind) or {})}
    return {"parameters": None, "strict": None, **flat} if kind == "function" else flat
