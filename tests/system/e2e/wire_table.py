"""Requests that a real vLLM and the simulated engine must answer alike, and what "alike" means.

Ids, times and log probabilities are masked, and so are the numbers of sampled tokens: every reply is tokenized at random. The text is
scripted, and compared word for word, unless the row says that the text depends on the tokens (`WORDS_DIFFER`).
"""

import json

from rig.harness import TOOLS

CHAT = "/v1/chat/completions"
SCORED = {"prompt": [300, 301, 302, 303], "max_tokens": 1, "temperature": 0, "return_token_ids": True, "cache_salt": "a"}
HI = [{"role": "user", "content": "EPISODE:agent please"}]
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "EPISODE:hello please"}]
BAD = [{"role": "user", "content": "EPISODE:badcall please"}]
STOPS = [{"role": "user", "content": "EPISODE:stops please"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def called(arguments):
    call = CALL | {"function": {"name": "bash", "arguments": arguments}}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}]


ANSWERED = {
    "text": {"messages": TALK},
    "text-with-tools": {"messages": TALK, "tools": TOOLS},
    "call": {"messages": HI, "tools": TOOLS},
    "second-turn": {"messages": called('{"command": "ls"}'), "tools": TOOLS},
    "parallel-calls": {"messages": called('{"command": "ls"}') + called("{}")[1:], "tools": TOOLS},
    "thought-text-and-calls": {"messages": [{"role": "user", "content": "EPISODE:spoken please"}], "tools": TOOLS},
    "calls-without-tools": {"messages": [{"role": "user", "content": "EPISODE:spoken please"}]},
    "bad-call": {"messages": BAD, "tools": TOOLS},
    "bad-arguments-in-history": {"messages": called('{"command": oops}'), "tools": TOOLS},
    "empty-arguments-in-history": {"messages": called(""), "tools": TOOLS},
    "ids": {"messages": TALK, "return_token_ids": True},
    "ids-and-logprobs": {"messages": HI, "tools": TOOLS, "return_token_ids": True, "logprobs": True},
    "logprobs": {"messages": TALK, "logprobs": True},
    "top-logprobs": {"messages": TALK, "logprobs": True, "top_logprobs": 2},
    "ids-as-tokens": {"messages": TALK, "logprobs": True, "return_tokens_as_token_ids": True},
    "hidden-reasoning": {"messages": HI, "tools": TOOLS, "include_reasoning": False},
    "hidden-reasoning-with-ids": {"messages": HI, "include_reasoning": False, "return_token_ids": True, "logprobs": True},
    "tool-choice-none": {"messages": HI, "tools": TOOLS, "tool_choice": "none"},
    "no-thinking": {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
    "effort-none": {"messages": TALK, "reasoning_effort": "none"},
    "effort-low": {"messages": TALK, "reasoning_effort": "low"},
    "stop-string": {"messages": STOPS, "stop": ["HALT"]},
    "stop-string-shown": {"messages": STOPS, "stop": "HALT", "include_stop_str_in_output": True},
    "two": {"messages": TALK, "n": 2},
    "two-with-ids": {"messages": HI, "tools": TOOLS, "n": 2, "return_token_ids": True, "logprobs": True},
    "cut-in-thought": {"messages": HI, "max_tokens": 4},
    "one-token": {"messages": HI, "max_tokens": 1, "return_token_ids": True},
    "no-model": {"messages": TALK, "model": None},
    "no-options": {"messages": TALK, "stream_options": {}},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "EPISODE:hello"}, {"type": "text", "text": "b"}]}]},
    "developer": {"messages": [{"role": "developer", "content": "Be kind."}, *HI]},
    "given-ids": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}, "max_tokens": 3, "return_token_ids": True},
    "given-ids-null": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": None}, "return_token_ids": True},
    "unknown-members": {"messages": TALK, "no_such_member": 1, "metadata": {"a": "b"}},
    "no-generation-prompt": {"messages": TALK, "add_generation_prompt": False, "max_tokens": 3},
    "ignore-eos": {"messages": TALK, "ignore_eos": True, "max_tokens": 60, "return_token_ids": True},
}
WORDS_DIFFER = {"cut-in-thought", "one-token", "given-ids", "no-generation-prompt", "ignore-eos"}
"""Rows whose text depends on its tokens, or is not scripted."""

REFUSED = {
    "messages-missing": {},
    "messages-text": {"messages": "hi"},
    "messages-empty": {"messages": []},
    "message-null": {"messages": [None]},
    "no-role": {"messages": [{"content": "hi"}]},
    "content-number": {"messages": [{"role": "user", "content": 5}]},
    "no-such-model": {"messages": TALK, "model": "nope"},
    "temperature-text": {"messages": TALK, "temperature": "hot"},
    "temperature-negative": {"messages": TALK, "temperature": -1},
    "n-zero": {"messages": TALK, "n": 0},
    "max-tokens-zero": {"messages": TALK, "max_tokens": 0},
    "max-tokens-huge": {"messages": TALK, "max_tokens": 10**6},
    "top-logprobs-alone": {"messages": TALK, "top_logprobs": 2},
    "logprob-ids-alone": {"messages": TALK, "logprob_token_ids": [5]},
    "top-logprobs-99": {"messages": TALK, "logprobs": True, "top_logprobs": 99},
    "tools-empty": {"messages": TALK, "tools": []},
    "choice-without-tools": {"messages": TALK, "tool_choice": "required"},
    "effort-unknown": {"messages": TALK, "reasoning_effort": "huge"},
    "arguments-object": {"messages": called({"command": "ls"}), "tools": TOOLS},
    "arguments-null": {"messages": called(None), "tools": TOOLS},
    "ids-empty": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": []}},
    "ids-negative": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": [-1]}},
    "ids-text": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": ["a"]}},
    "ids-too-large": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": [10**6]}},
    "ids-too-many": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": [5] * 40000}},
    "ids-leave-no-room": {"messages": TALK, "kv_transfer_params": {"prompt_token_ids": [5] * 32768}},
    "prompt-too-long": {"messages": [{"role": "user", "content": "word " * 40000}]},
    "allowed-empty": {"messages": TALK, "allowed_token_ids": []},
    "allowed-too-large": {"messages": TALK, "allowed_token_ids": [10**6]},
    "options-without-stream": {"messages": TALK, "stream_options": {"include_usage": True}},
    "continue-and-prompt": {"messages": TALK, "continue_final_message": True},
    "own-template": {"messages": TALK, "chat_template": "{{ messages }}"},
}

OTHERS = {
    "version": ("GET", "/version", None),
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "no-such-route": ("GET", "/no/such/route", None),
    "no-such-method": ("GET", CHAT, None),
    "not-json": ("POST", CHAT, b"{not json"),
    "no-body": ("POST", CHAT, b""),
    "list-body": ("POST", CHAT, b"[]"),
    "tokenize": ("POST", "/tokenize", {"messages": TALK, "tools": TOOLS}),
    "tokenize-strings": ("POST", "/tokenize", {"prompt": "hi<|im_end|> é", "return_token_strs": True}),
    "tokenize-nothing": ("POST", "/tokenize", {}),
    "prompt-logprobs": ("POST", "/v1/completions", SCORED | {"prompt_logprobs": 0}),
    "prompt-logprobs-too-many": ("POST", "/v1/completions", SCORED | {"prompt_logprobs": 21}),
    "prompt-logprobs-all": ("POST", "/v1/completions", SCORED | {"prompt_logprobs": -1}),
    "prompt-logprobs-negative": ("POST", "/v1/completions", SCORED | {"prompt_logprobs": -2}),
    "prompt-logprobs-streamed": ("POST", "/v1/completions", SCORED | {"prompt_logprobs": 1, "stream": True}),
    "tokenize-no-such-model": ("POST", "/tokenize", {"prompt": "hi", "model": "nope"}),
    "detokenize": ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    "detokenize-nothing": ("POST", "/detokenize", {"tokens": "a"}),
}

CONVERSATIONS = {
    "plain": (TALK, {}),
    "tools": (TALK, {"tools": TOOLS}),
    "called": (called('{"command": "ls", "n": 1.0, "é": [1, null]}'), {"tools": TOOLS}),
    "called-without-tools": (called('{"command": "ls"}'), {}),
    "bad-arguments": (called('{"command": oops}'), {"tools": TOOLS}),
    "several-calls": (
        [*HI, {"role": "assistant", "content": "Both.", "tool_calls": [CALL, CALL | {"id": "c2"}]}]
        + [{"role": "tool", "tool_call_id": name, "content": name} for name in ("c1", "c2")],
        {"tools": TOOLS},
    ),
    "thought": ([*HI, {"role": "assistant", "reasoning": "Hm.", "content": "Yes."}, {"role": "user", "content": "And?"}], {}),
    "last-thought": (
        [*called("{}")[:1], {"role": "assistant", "reasoning": "Hm.", "content": "", "tool_calls": [CALL]}, called("{}")[2]],
        {},
    ),
    "inline-thought": ([*HI, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}, {"role": "user", "content": "And?"}], {}),
    "white-space": (
        [{"role": "user", "content": "  \n a \n\n"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": ""}],
        {},
    ),
    "markup": ([{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\n<think> <tool_call></tool_response>"}], {}),
    "unicode": ([{"role": "user", "content": "naïve 東京 🙂 e\u0301 \u200b \ufeff \u2028 ½ ﬁ"}], {}),
    "two-systems": ([{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HI], {}),
    "late-system": ([*HI, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": "Mind."}, *HI], {}),
    "developer": ([{"role": "developer", "content": "Be kind."}, *HI], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    "no-thinking": (TALK, {"chat_template_kwargs": {"enable_thinking": False}}),
    "no-generation-prompt": (TALK, {"add_generation_prompt": False}),
    "continue": ([*HI, {"role": "assistant", "content": "I was"}], {"add_generation_prompt": False, "continue_final_message": True}),
    "null-content": ([*HI, {"role": "assistant", "content": None}, *HI], {}),
    "results-in-a-row": ([*called("{}"), called("{}")[2], *HI], {"tools": TOOLS}),
    "unknown-tool-members": (TALK, {"tools": [{"type": "function", "x": 1, "function": {"name": "f", "strict": True, "y": 2}}]}),
}

_LITERAL = {"object", "role", "type", "finish_reason", "stop_reason", "model", "name", "param", "message", "code", "detail", "owned_by"}
_WORDS = {"content", "reasoning", "arguments"}
_KEPT = {"prompt_tokens", "count", "max_model_len", "tokens", "prompt_token_ids", "code", "index"}


def shape(value, key="", *, words=True):
    """An answer with everything masked that must differ; the order of keys stays."""
    if isinstance(value, dict):
        return {name: shape(inner, name, words=words) for name, inner in value.items()}
    if value is None or isinstance(value, bool) or key in _KEPT:
        return value
    if isinstance(value, list):
        return _list_shape(value, key, words=words)
    if isinstance(value, str):
        return value if key in _LITERAL or (words and key in _WORDS) else "text"
    return "number"


def _list_shape(items, key, *, words):
    if key == "bytes" or (items and all(isinstance(item, (int, float)) for item in items)):
        return "numbers"
    if key == "content" and items:  # log probabilities: as many as tokens
        return [shape(items[0], words=words)]
    return [shape(item, key, words=words) for item in items]


def stream_shape(raw):
    """The kinds of chunks of a stream in the order in which they first appear, and the text of all of them together."""
    kinds, texts = [], {}
    for line in raw.decode().split("\n\n"):
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            kinds.append(data)
            continue
        chunk = json.loads(data)
        for choice in chunk.get("choices", []):
            for name in ("content", "reasoning"):
                texts[choice["index"], name] = texts.get((choice["index"], name), "") + (choice["delta"].get(name) or "")
            for piece in choice["delta"].get("tool_calls") or []:
                place = (choice["index"], piece["index"])
                texts[place] = texts.get(place, "") + (piece["function"].get("name") or "") + (piece["function"].get("arguments") or "")
        kind = shape(chunk, words=False)
        if kind not in kinds:
            kinds.append(kind)
    return kinds, texts
