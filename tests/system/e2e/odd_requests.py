"""Odd requests in each dialect, as bytes: one member with each odd value, several of them at once, and bodies in odd spellings.

The same requests in every run. They are written by hand and not by a JSON writer, which would give no member twice and write no NaN.
"""

import itertools
import random
from typing import NamedTuple

CHAT, COMPLETIONS, TOKENIZE, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/messages", "/v1/responses"
JSON = "application/json"

VALUES = (
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "2",
        "7",
        "-1",
        "-0",
        "-0.0",
        "0.0",
        "0e0",
        "1.0",
        "2.0",
        "2.5",
        "1e1",
        "1e999",
        "NaN",
        "-Infinity",
    ),
    *("18446744073709551616", "1e30", '""', '"0"', '"1"', '"2"', '"2.0"', '" 2"', '"1_0"', '"true"', '"False"', '"off"', '"yes"', '"none"'),
    *(
        '"n\\u006fne"',
        '"auto"',
        '"low"',
        '"x"',
        '"\\ud800"',
        '"NaN"',
        "[]",
        "[ ]",
        "[1]",
        '["1"]',
        '["x", 1]',
        "[1.0, 2.0]",
        "[true, false]",
    ),
    *("[null]", "[[1, 2], [3]]", "[[1], 2]", '["1", 2]', '[1, "2"]', '["a", "b"]', "[[]]", '[{"a": "b"}]', '[{"a": 1}]', "{}", "{ }"),
    *(
        '{"a": 1}',
        '{"a": 1.0}',
        '{"a": true}',
        '{"a": null}',
        '{"a": NaN}',
        '{"a": 100000000000000000000}',
        '{"1": "2"}',
        '{"a": "\\ud800"}',
    ),
    *(
        '{"prompt_token_ids": null}',
        '{"prompt_token_ids": []}',
        '{"include_usage": "off"}',
        '{"include_usage": -0.0}',
        '{"include_usage": 1}',
    ),
    *('{"include_usage": true}', '{"include_usage": false}', '{"include_usage": null}', '{"include_usage": "Y"}', '{"type": "none"}'),
    *('{"type": "function", "function": {"name": "f"}}', '{"type": "tool", "name": "f"}', '{"type": "text"}', '{"enable_thinking": 0}'),
    *('{"effort": "low"}', '{"type": "enabled", "budget_tokens": "9"}'),
)
"""Values of a member, as JSON."""

COMMON = (
    *("model", "n", "stream", "stream_options", "max_tokens", "min_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "stop"),
    *("stop_token_ids", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "prompt_logprobs", "echo", "best_of"),
    *("use_beam_search", "length_penalty", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"),
    *("return_token_ids", "return_tokens_as_token_ids", "kv_transfer_params", "vllm_xargs", "cache_salt", "add_special_tokens"),
    *("allowed_token_ids", "bad_words", "response_format", "structured_outputs", "logprob_token_ids", "extra_body", "Stream", "unknown"),
    *("routed_experts_prompt_start", "user", "thinking_token_budget", "repetition_detection"),
    "return_weight_versions",
)
MEMBERS = {
    CHAT: (
        *COMMON,
        *("max_completion_tokens", "top_logprobs", "include_reasoning", "continue_final_message", "add_generation_prompt", "documents"),
        *(
            "chat_template",
            "chat_template_kwargs",
            "mm_processor_kwargs",
            "reasoning_effort",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        ),
        *("return_prompt_text", "messages"),
    ),
    COMPLETIONS: (*COMMON, "prompt", "prompt_embeds", "suffix"),
    TOKENIZE: (
        *("model", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs"),
        *("mm_processor_kwargs", "tools", "messages", "prompt", "return_token_strs", "tool_choice"),
    ),
    MESSAGES: (
        *(
            "model",
            "max_tokens",
            "metadata",
            "output_config",
            "thinking",
            "stop_sequences",
            "stream",
            "temperature",
            "tool_choice",
            "tools",
        ),
        *(
            "top_k",
            "top_p",
            "cache_salt",
            "kv_transfer_params",
            "vllm_xargs",
            "chat_template_kwargs",
            "system",
            "messages",
            "n",
            "logprobs",
        ),
    ),
    RESPONSES: (
        *("model", "max_output_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "top_logprobs", "store", "background", "n"),
        *("parallel_tool_calls", "previous_response_id", "include", "instructions", "tool_choice", "tools", "reasoning", "input", "text"),
        *("truncation", "include_stop_str_in_output", "presence_penalty", "seed", "stop", "kv_transfer_params", "cache_salt", "max_tokens"),
        *("chat_template_kwargs", "include_reasoning", "prompt", "skip_special_tokens", "repetition_penalty", "ignore_eos", "logprobs"),
    ),
}
"""The members that vLLM or the proxy reads, by dialect, and some that neither does."""

TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
ASK = '[{"role": "user", "content": "hello"}]'
BASES = {
    CHAT: [
        {"model": '"sim"', "messages": ASK},
        {"model": '"sim"', "messages": ASK, "stream": "true", "tools": TOOLS},
        {"model": '"sim"', "messages": ASK, "logprobs": "true"},
    ],
    COMPLETIONS: [{"model": '"sim"', "prompt": '"hello"'}, {"model": '"sim"', "prompt": "[1, 2]", "stream": "true", "logprobs": "1"}],
    TOKENIZE: [{"model": '"sim"', "messages": ASK}, {"model": '"sim"', "prompt": '"hello"'}],
    MESSAGES: [
        {"model": '"sim"', "max_tokens": "9", "messages": ASK},
        {"model": '"sim"', "max_tokens": "9", "messages": ASK, "stream": "true", "tools": '[{"name": "f", "input_schema": {}}]'},
    ],
    RESPONSES: [
        {"model": '"sim"', "input": '"hello"'},
        {"model": '"sim"', "input": '"hello"', "stream": "true", "tools": '[{"type": "function", "name": "f", "parameters": {}}]'},
    ],
}
"""Ordinary requests, to which odd members are added."""

PARTS = (
    *('"a"', '""', '"\\ud800"', "null", "1", "[]", "{}", '{"text": "a"}', '{"type": null, "text": "a"}', '{"type": "text"}'),
    *('{"type": "text", "text": null}', '{"type": "text", "text": ""}', '{"type": "text", "text": "b"}', '{"type": "text", "text": 1}'),
    *('{"type": "TEXT", "text": "a"}', '{"type": ["text"], "text": "a"}', '{"type": "text", "text": "a", "text": "b"}'),
    *('{"type": "text", "t\\u0065xt": "c"}', '{"type": "refusal", "refusal": "r", "text": "a"}', '{"type": "thinking", "thinking": "t"}'),
    *('{"type": "refusal", "refusal": null}', '{"type": "thinking", "thinking": null}', '{"type": "thinking", "text": "a"}'),
    *('{"type": "input_text", "text": "a"}', '{"type": "output_text", "text": "a", "annotations": []}', '{"type": "output_text"}'),
    *(
        '{"type": "text", "text": "a", "uuid": "u"}',
        '{"type": "text", "text": "a", "uuid": null}',
        '{"type": "tool_reference", "name": "f"}',
    ),
    *('{"type": "text", "text": "a", "image_url": null}', '{"type": "text", "text": "a", "image_pil": 0}', '{"image_url": "data:,"}'),
    *('{"type": "text", "text": "a", "input_audio": {}}', '{"type": "image_url", "image_url": {"url": "data:,"}, "text": "a"}'),
    *('{"type": "text", "text": "a", "prompt_embeds": false}', '{"type": "text", "text": "a", "tool_reference": null}', '{"type": "x"}'),
    *('{"type": "text", "text": "a", "refusal": "r", "thinking": "t"}', '{"type": "text", "text": "a", "cache_control": {"type": "x"}}'),
)
CONTENTS = ("null", '""', '"a"', "1", "true", "{}", '{"type": "text", "text": "a"}', "[]", '" a\\n"', '"<think>t</think>a"')
CALL = '{"id": "c1", "type": "function", "function": {"name": "f", "arguments": %s}}'
CALLS = (
    *("null", "[]", "{}", '""', "0", "false", "[null]", "[{}]", '"ab"', '[{"function": {"name": "f"}}]', '[{"id": 1, "type": "function"}]'),
    *(f"[{CALL % arguments}]" for arguments in ('"{}"', '""', "null", "{}", '"{"', '"[1]"', '"NaN"', '"{\\"a\\": 1.0}"', "1", '"\\ud800"')),
    *('[{"id": null, "type": "function", "function": {"name": "f", "arguments": "{}"}}]', f"[{CALL % 1}, {CALL % 2}]"),
    *('[{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]', '[{"id": "c", "function": {"name": null}}]'),
)
WORDS = ("null", '""', '"x"', '" x "', "1", "[]", "{}", '"\\ud800"')
"""Texts, and what is none."""


class Odd(NamedTuple):
    """A request: its path, its body, and the type of the body."""

    path: str
    body: bytes
    kind: str = JSON


def written(members):
    """A JSON object with these pairs, whatever they are; names are written as they are given."""
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in members) + "}").encode("utf-8", "surrogatepass")


def escaped(name):
    """A name with its first letter as an escape."""
    return f"\\u{ord(name[0]):04x}{name[1:]}"


def singles():
    """Each member with each value, in each base of its dialect."""
    for path, members in MEMBERS.items():
        for number, base in enumerate(BASES[path]):
            for name, value in itertools.product(members, VALUES):
                if number == 0 or path == CHAT or name in base or hash_of(name, value) % 4 == 0:
                    yield Odd(path, written({**base, name: value}.items()))


def hash_of(*texts):
    """A small number that is the same in every process."""
    return sum(map(ord, "".join(texts)))


def messages():
    """Chats with odd messages."""

    def chat(*said):
        return Odd(CHAT, written({**BASES[CHAT][0], "messages": "[" + ", ".join(said) + "]"}.items()))

    for role in ("user", "assistant", "system", "tool", "developer"):
        for content in (*CONTENTS, *(f"[{part}]" for part in PARTS), *(f'["x", {part}, "y"]' for part in PARTS)):
            yield chat(f'{{"role": "{role}", "content": {content}}}')
    for member in ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal", "audio", "function_call", "prompt_token_ids"):
        for role, value in itertools.product(("user", "assistant", "tool"), WORDS):
            yield chat(f'{{"role": "{role}", "content": "a", "{member}": {value}}}')
    for one, other in itertools.product(WORDS, WORDS):
        yield chat(f'{{"role": "assistant", "content": "a", "reasoning": {one}, "reasoning_content": {other}}}')
    for calls, content in itertools.product(CALLS, ("null", '"a"')):
        yield chat(f'{{"role": "assistant", "content": {content}, "tool_calls": {calls}}}')
        yield chat(f'{{"role": "user", "content": {content}, "tool_calls": {calls}}}')
    for role in ("null", '""', '"User"', '"function"', "1", "[]", '"us\\u0065r"'):
        yield chat(f'{{"role": {role}, "content": "a"}}')
    for message in (
        "null",
        "1",
        '"a"',
        "[]",
        "{}",
        '{"content": "a"}',
        '{"role": "user"}',
        '{"role": "user", "role": "system", "content": 1}',
    ):
        yield chat(message)


def together(count, seed):
    """Several odd members at once: in another case, escaped, or twice."""
    chance = random.Random(seed)
    paths = list(MEMBERS)
    for number in range(count):
        path = paths[number % len(paths)]
        members = dict(chance.choice(BASES[path]))
        for name in chance.sample(MEMBERS[path], chance.randint(2, 4)):
            members[name] = chance.choice(VALUES)
        pairs = list(members.items())
        name, value = chance.choice(pairs)
        match chance.randrange(5):
            case 0:
                pairs = [(escaped(other) if other == name else other, given) for other, given in pairs]
            case 1:
                pairs.append((chance.choice((name, escaped(name))), chance.choice((value, *VALUES))))
            case 2:
                pairs.append((chance.choice((name.upper(), name.title(), f"{name} ", name.replace("_", "-"))), chance.choice(VALUES)))
        chance.shuffle(pairs)
        yield Odd(path, written(pairs))


def spellings():
    """Ordinary bodies in other encodings, with something around them, or of another type."""
    for path, bases in BASES.items():
        body = written(bases[0].items())
        text = body.decode()
        for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"):
            yield Odd(path, text.encode(encoding))
        yield from (Odd(path, other) for other in (b"", b"null", b"[]", b'"a"', b"{}", b"[%b]" % body, body[:-1], b"\xef\xbb\xbf"))
        yield from (Odd(path, body + more) for more in (b"\n \t", b"x", b"{}", b"\0", b"\xa0", b"//", b","))
        yield from (Odd(path, more + body) for more in (b"\r\n ", b"\x0b", b"\xc2\xa0", b"\x00"))
        yield from (
            Odd(path, body.replace(b"hello", word)) for word in (b"\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"a\nb", b"\x00", b"\\u00zz")
        )
        yield from (Odd(path, body.replace(b", ", between)) for between in (b",\n", b",,", b" ", b"\xef\xbb\xbf, "))
        for kind in ("", "text/plain", "application/json; charset=utf-16", "application/x-www-form-urlencoded", "APPLICATION/JSON"):
            yield Odd(path, body, kind)
        deep = '"x": ' + "[" * 2000 + "]" * 2000
        yield Odd(path, text.replace("{", "{" + deep + ", ", 1).encode())


def odd_requests(seed=31, count=1500):
    """All of them."""
    return [*singles(), *messages(), *together(count, seed), *spellings()]
