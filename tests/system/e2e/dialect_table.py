"""Requests that vLLM's own converters accept too, and permitted differences between a proxied and a direct call.

Every request names an episode, by which its call is found in the engine's log. The model of `TALK` calls no tools, that of `WORK` does.
`OTHER_PROMPTS` lists the requests for which the proxy intentionally sends the engine another prompt, with the reason. `OTHER_MEMBERS`
lists members of answers and events that only one of the two has; `OTHER_WORDS` lists those that both have with different text, with the
reason. Any difference that is not listed here is a bug.
"""

import json

from rig.harness import TOOLS

START, JOB = "EPISODE:talk please", "EPISODE:spoken please"
TALK, WORK = [{"role": "user", "content": START}], [{"role": "user", "content": JOB}]
DECLARED = [tool["function"] for tool in TOOLS]

# ---- Anthropic Messages

M_TOOLS = [
    {"name": tool["name"], "input_schema": tool["parameters"]} | ({"description": tool["description"]} if "description" in tool else {})
    for tool in DECLARED
]
USED = {"type": "tool_use", "id": "c1", "name": "bash", "input": {"timeout": 1.5, "command": "ls # é"}}


def with_results(content, **more):
    """A call and its result, both of another model, and the user's next message."""
    return [*WORK, {"role": "assistant", "content": [USED | more]}, {"role": "user", "content": content}]


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "c1", "content": content} | more


def text(words):
    return {"type": "text", "text": words}


MESSAGES = {
    "text": {"messages": TALK},
    "tools": {"messages": WORK, "tools": M_TOOLS},
    "system": {"messages": TALK, "system": "Be kind — ☕."},
    "system-blocks": {"messages": TALK, "system": [text("One."), text(""), text("Two."), text("x-anthropic-billing-header: 1")]},
    "system-billing": {"messages": TALK, "system": "x-anthropic-billing-header: 1\nBe kind."},
    "system-in-between": {"messages": [*TALK, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": "Mind."}, *TALK]},
    "blocks": {"messages": [{"role": "user", "content": [text(START), text(""), text("More.")]}]},
    "cache-marks": {"messages": [{"role": "user", "content": [text(START) | {"cache_control": {"type": "ephemeral"}}]}]},
    "result": {"messages": with_results([result("a.txt\n")]), "tools": M_TOOLS},
    "result-blocks": {"messages": with_results([result([text("a"), text(""), text("b")])]), "tools": M_TOOLS},
    "result-empty": {"messages": with_results([result([])]), "tools": M_TOOLS},
    "result-error": {"messages": with_results([result("no such file", is_error=True)]), "tools": M_TOOLS},
    "result-between-words": {"messages": with_results([text("before"), result("a.txt"), text("after")]), "tools": M_TOOLS},
    "input-empty": {"messages": with_results([result("a")], input={}), "tools": M_TOOLS},
    "thinking": {
        "messages": [
            *TALK,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("Yes.")]},
            *TALK,
        ]
    },
    "thinking-and-call": {
        "messages": [
            *WORK,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("So."), USED]},
            {"role": "user", "content": [result("a")]},
        ],
        "tools": M_TOOLS,
    },
    "two-texts": {"messages": [*TALK, {"role": "assistant", "content": [text("One."), text("Two.")]}, *TALK]},
    "two-replies": {"messages": [*TALK, {"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}, *TALK]},
    "assistant-last": {"messages": [*TALK, {"role": "assistant", "content": "I was"}]},
    "thinking-off": {"messages": TALK, "thinking": {"type": "disabled"}},
    "thinking-adaptive": {"messages": WORK, "thinking": {"type": "adaptive"}, "tools": M_TOOLS},
    "effort": {"messages": TALK, "output_config": {"effort": "low"}},
    "choice-none": {"messages": WORK, "tools": M_TOOLS, "tool_choice": {"type": "none"}},
    "choice-auto": {"messages": WORK, "tools": M_TOOLS, "tool_choice": {"type": "auto"}},
    "tools-empty": {"messages": TALK, "tools": []},
    "schema-without-type": {"messages": WORK, "tools": [{"name": "bash", "input_schema": {"properties": {}}}]},
    "strict": {"messages": WORK, "tools": [M_TOOLS[1] | {"strict": False}]},
    "template-arguments": {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
    "stop": {"messages": [{"role": "user", "content": "EPISODE:stops please"}], "stop_sequences": ["HALT"]},
    "limit": {"messages": TALK, "max_tokens": 3},
    "bad-call": {"messages": [{"role": "user", "content": "EPISODE:badcall please"}], "tools": M_TOOLS},
}

# ---- OpenAI Responses

R_TOOLS = [{"type": "function", **function} for function in DECLARED]
CALLED = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": json.dumps(USED["input"])}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a.txt\n"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
}


def user_content(words):
    return {"type": "input_text", "text": words}


RESPONSES = {
    "text": {"input": START},
    "tools": {"input": JOB, "tools": R_TOOLS},
    "instructions": {"input": START, "instructions": "Be kind — ☕."},
    "messages": {"input": [{"role": "developer", "content": "Be kind."}, *TALK]},
    "parts": {"input": [{"type": "message", "role": "user", "content": [user_content(START), user_content("More.")]}]},
    "system-later": {"input": [*TALK, ANSWER, {"role": "system", "content": "Mind."}, *TALK]},
    "result": {"input": [*WORK, CALLED, OUTPUT], "tools": R_TOOLS},
    "result-parts": {"input": [*WORK, CALLED, OUTPUT | {"output": [user_content("a"), user_content("b")]}], "tools": R_TOOLS},
    "two-calls": {"input": [*WORK, CALLED, CALLED | {"call_id": "c2"}, OUTPUT, OUTPUT | {"call_id": "c2"}], "tools": R_TOOLS},
    "bad-arguments": {"input": [*WORK, CALLED | {"arguments": "{oops"}, OUTPUT], "tools": R_TOOLS},
    "easy-answer": {"input": [*TALK, {"role": "assistant", "content": "Yes."}, *TALK]},
    "thought-and-answer": {"input": [*TALK, THOUGHT, ANSWER, *TALK]},
    "thought-answer-call": {"input": [*WORK, THOUGHT, ANSWER, CALLED, OUTPUT], "tools": R_TOOLS},
    "thought-and-call": {"input": [*WORK, THOUGHT, CALLED, OUTPUT], "tools": R_TOOLS},
    "summary": {"input": [*TALK, THOUGHT | {"content": None, "summary": [{"type": "summary_text", "text": "Hm."}]}, CALLED, OUTPUT]},
    "two-answers": {"input": [*TALK, ANSWER, ANSWER | {"id": "msg_2"}, *TALK]},
    "answer-of-two-parts": {"input": [*TALK, ANSWER | {"content": ANSWER["content"] * 2}, *TALK]},
    "call-then-answer": {"input": [*WORK, CALLED, ANSWER, OUTPUT], "tools": R_TOOLS},
    "unfinished-answer": {"input": [*TALK, ANSWER | {"status": "incomplete"}]},
    "effort": {"input": START, "reasoning": {"effort": "low"}},
    "effort-none": {"input": START, "reasoning": {"effort": "none"}},
    "choice-none": {"input": JOB, "tools": R_TOOLS, "tool_choice": "none"},
    "tools-empty": {"input": START, "tools": []},
    "strict": {"input": JOB, "tools": [R_TOOLS[1] | {"strict": False}]},
    "hosted-tool": {"input": JOB, "tools": [*R_TOOLS, {"type": "web_search"}]},
    "custom-tool": {"input": JOB, "tools": [{"type": "custom", "name": "note", "description": "Writes."}]},
    "namespace": {"input": JOB, "tools": [{"type": "namespace", "name": "shell", "description": "", "tools": R_TOOLS}]},
    "limit": {"input": START, "max_output_tokens": 3},
    "stop": {"input": "EPISODE:stops please", "stop": ["HALT"]},
    "bad-call": {"input": "EPISODE:badcall please", "tools": R_TOOLS},
    "no-reasoning": {"input": START, "include_reasoning": False},
    "template-arguments": {"input": START, "chat_template_kwargs": {"enable_thinking": False}},
    "metadata": {"input": START, "metadata": {"a": "b"}, "user": "u", "temperature": 0.5, "top_p": 0.9, "truncation": "auto"},
}

# ---- Gemini

G_TOOLS = [{"functionDeclarations": [{"parametersJsonSchema": tool["parameters"], "name": tool["name"]} for tool in DECLARED]}]


def contents(words):
    return [{"role": "user", "parts": [{"text": words}]}]


THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}
GEMINI = {
    "text": {"contents": contents(START), "systemInstruction": {"parts": [{"text": "Be kind."}]}},
    "tools": {"contents": contents(JOB), "tools": G_TOOLS, "generationConfig": THOUGHTS},
    "thoughts-hidden": {"contents": contents(JOB), "tools": G_TOOLS},
    "thinking-off": {"contents": contents(START), "generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}},
    "stop": {"contents": contents("EPISODE:stops please"), "generationConfig": THOUGHTS | {"stopSequences": ["HALT"]}},
    "limit": {"contents": contents("EPISODE:plain please"), "generationConfig": {"maxOutputTokens": 1}},
    "bad-call": {"contents": contents("EPISODE:badcall please"), "tools": G_TOOLS},
}

OTHER_PROMPTS = {
    ("messages", "two-texts"): "the engine emitted one string, vLLM puts its blocks on separate lines",
    ("messages", "two-replies"): "adjacent entries are one turn in Anthropic's API, two in vLLM",
    ("messages", "assistant-last"): "Anthropic's API continues such an entry, vLLM begins a new message",
    ("responses", "answer-of-two-parts"): "vLLM reads only the first part",
}

# ---- permitted differences of the answers

SHOWN = {
    "messages": ("text", "tools", "thinking-and-call", "input-empty", "thinking-off", "choice-none", "stop", "limit", "bad-call"),
    "responses": (
        "instructions", "tools", "thought-answer-call", "two-calls", "effort-none", "choice-none", "stop", "limit", "bad-call",
        "custom-tool", "namespace", "no-reasoning", "metadata",
    ),
}  # fmt: skip
"""Requests whose answers are compared, too."""

OTHER_MEMBERS = {
    "messages": {
        r"message\.stop_sequence|(message\.)?usage\.cache_\w+": "Anthropic always has them; vLLM omits null and unknown ones",
        r"content_block\.signature": "Anthropic's blocks begin with an empty one",
    },
    "responses": {
        r"response\.(\w+_transfer_params|(in|out)put_messages|(frequency|presence)_penalty)": "vLLM's own",
        r"response\.usage\.\w+\.(\w+_per_turn|tool_output_tokens)": "vLLM's own",
        r"response\.(error|store|prompt|prompt_cache_key|safety_identifier|metadata|top_logprobs|(text|reasoning)(\..*)?)": (
            "shown with OpenAI's defaults; vLLM omits them or has null"
        ),
        r"response\.(temperature|top_p|max_output_tokens)": "null if not requested; vLLM shows its default",
        r"(item|response\.output\[\d+\])\(\w+\)\.(phase|namespace|async|caller|encrypted_content)": "omitted where vLLM has null",
        r"(.*\.content\[\d+\]|part)\.logprobs": "openai 3.52 requires a list; vLLM has null",
        r"(item|response\.output\[\d+\])\((reasoning|custom_tool_call)\)\.status": (
            "vLLM has none for custom calls, and for reasoning only in streams"
        ),
        r"item\(reasoning\)\.content": "reasoning begins with an empty list, in vLLM with null",
        r"name": "of the event for a call's complete arguments; openai 3.52 has no such member",
    },
}
OTHER_WORDS = {"response.tools": "shown as they were sent; vLLM fills in missing ones"}
THINKS_IN_TEXT = {"messages": "thinking-off", "responses": "effort-none"}
"""The model thinks regardless. vLLM leaves `<think>` in the text; the proxy shows it as thinking (docs/dialects.md)."""
ENDS_OTHERWISE = {"messages": {}, "responses": {"limit": "response.incomplete"}}
"""How a stream ends through the proxy and at OpenAI, where vLLM sends `response.completed` for an incomplete response."""
