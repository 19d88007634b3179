"""Parsing replies, whole and in pieces. Every expected value was recorded from a running vLLM 0.32.0."""

import json
import random

import pytest

from tokencache.testing import build_tokenizer
from tokencache.testing.parser import ParsedText, StreamParser, count_reasoning, parse_reply, reasoning_is_over


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


AGREE = {
    "thinking, text": ("<think>\nwhy\n</think>\n\nHello.", ParsedText("\nwhy\n", "\n\nHello.")),
    "no opening tag": ("why\n</think>\n\nHello", ParsedText("why\n", "\n\nHello")),
    "no thinking at all is all thinking": ("Plain answer.", ParsedText("Plain answer.", None)),
    "unfinished thinking": ("<think>\nonly thoughts", ParsedText("\nonly thoughts", None)),
    "a call ends thinking": ("Plain.\n" + call("f", "{}"), ParsedText("Plain.\n", None, [("f", "{}")])),
    "text and call": ("</think>\n\nA ☕\n" + call("f", '{"a": 1}'), ParsedText(None, "\n\nA ☕\n", [("f", '{"a": 1}')])),
    "two calls": ("</think>A" + call("f", '{"a": 1}') + "\n" + call("g", "{}"), ParsedText(None, "A", [("f", '{"a": 1}'), ("g", "{}")])),
    "text behind calls is lost": ("</think>A" + call("f", "{}") + "\nB", ParsedText(None, "A", [("f", "{}")])),
    "a call that never closes": ("</think>A" + call("f", '{"a": "b"}')[:-12], ParsedText(None, "A", [("f", '{"a": "b"}')])),
    "arguments as a string": ("</think>A" + call("f", '"{}"'), ParsedText(None, "A", [("f", '"{}"')])),
    "only a call": (call("f", "{}"), ParsedText(None, None, [("f", "{}")])),
    "nothing": ("", ParsedText(None, None)),
    "whitespace": ("<think>\nq\n</think>\n\n", ParsedText("\nq\n", "\n\n")),
    "end of turn within thinking": ("a<|endoftext|>b</think>c", ParsedText("ab", "c")),
    "markup of other kinds": ("</think>x <tool <|im_start|> </tool_call> y", ParsedText(None, "x <tool <|im_start|> </tool_call> y")),
}

DIFFER = {
    "whitespace before a call": (
        "</think>\n\n" + call("f", "{}"),
        ParsedText(None, None, [("f", "{}")]),
        ParsedText(None, "\n\n", [("f", "{}")]),
    ),
    "spacing of arguments": (
        "</think>A" + call("f", '{"a":2.50}'),
        ParsedText(None, "A", [("f", '{"a": 2.5}')]),
        ParsedText(None, "A", [("f", '{"a":2.50}')]),
    ),
    "arguments that are no JSON": (
        "</think>A" + call("f", '{"a": "ls}'),
        ParsedText(None, "A" + call("f", '{"a": "ls}')),
        ParsedText(None, "A", [("f", '{"a": "ls}}')]),
    ),
    "a good call, then a bad one": (
        "</think>A" + call("f", "{}") + "<tool_call>\n{bad\n</tool_call>",
        ParsedText(None, "A" + call("f", "{}") + "<tool_call>\n{bad\n</tool_call>"),
        ParsedText(None, "A", [("f", "{}")]),
    ),
    "cut within arguments": (
        '</think>A<tool_call>\n{"name": "f", "arguments": {"a": "l',
        ParsedText(None, 'A<tool_call>\n{"name": "f", "arguments": {"a": "l'),
        ParsedText(None, "A", [("f", '{"a": "l')]),
    ),
    "name after arguments": (
        '</think>A<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>',
        ParsedText(None, "A", [("f", '{"a": 1}')]),
        ParsedText(None, "A", [("f", '{"a": 1}, "name": "f"')]),
    ),
    "thinking closed twice": ("a</think>b</think>c", ParsedText("a", "bc"), ParsedText("a", "b</think>c")),
    "the beginning of a tag at the end": ("</think>a <", ParsedText(None, "a <"), ParsedText(None, "a ")),
}


def pieces(text, how):
    """Split a text into characters, at random, or not at all. Added tokens stay whole, as from a model."""
    tokenizer = build_tokenizer()
    atoms = []
    for token_id in tokenizer.encode(text):
        token = tokenizer.token_bytes(token_id).decode(errors="ignore")
        atoms.extend([token] if token.startswith("<") and token.endswith(">") else [])
    cut, rest = [], text
    for atom in atoms:
        before, rest = rest.split(atom, 1)
        cut.extend([*before, atom])
    cut.extend(rest)
    if how == "whole":
        return [text]
    if how == "characters":
        return cut
    rng, joined = random.Random(how), [""]
    for piece in cut:
        if rng.random() < 0.3:
            joined.append("")
        joined[-1] += piece
    return joined


def stream(text, how, **settings):
    """Join the deltas as a client does."""
    parser = StreamParser(tools=True, **settings)
    reasoning = content = ""
    calls = []
    parts = pieces(text, how)
    for delta in [*map(parser.feed, parts), parser.feed("", finished=True)]:
        assert list(delta or {}) in (
            [],
            ["reasoning"],
            ["content"],
            ["content", "reasoning"],
            ["content", "tool_calls"],
            ["content", "reasoning", "tool_calls"],
        )
        reasoning += (delta or {}).get("reasoning") or ""
        content += (delta or {}).get("content") or ""
        for part in (delta or {}).get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["id"].startswith("chatcmpl-tool-")
                calls.append((part["function"]["name"], ""))
            name, arguments = calls[part["index"]]
            calls[part["index"]] = (name, arguments + part["function"].get("arguments", ""))
    assert parser.called == bool(calls)
    return ParsedText(reasoning or None, content or None, calls)


@pytest.mark.parametrize("how", ["whole", "characters", 1, 2, 3])
@pytest.mark.parametrize("name", AGREE)
def test_a_stream_adds_up_to_the_whole_reply(name, how):
    text, expected = AGREE[name]
    assert parse_reply(text, tools=True) == expected
    assert stream(text, how) == expected


@pytest.mark.parametrize("name", DIFFER)
def test_where_a_stream_of_vllm_differs_from_a_whole_reply(name):
    text, whole, streamed = DIFFER[name]
    assert parse_reply(text, tools=True) == whole
    assert stream(text, "characters") == streamed


def test_without_tools_calls_are_text():
    text = f"</think>A{call('f', '{}')}"
    assert parse_reply(text, tools=False) == ParsedText(None, f"A{call('f', '{}')}")
    deltas = [StreamParser(tools=False).feed(text)]
    assert deltas == [{"content": f"A{call('f', '{}')}"}]


def test_with_thinking_turned_off_everything_is_content():
    assert parse_reply("Plain </think> answer", tools=True, thinking=False) == ParsedText(None, "Plain </think> answer")
    assert stream("Plain answer", "characters", thinking=False) == ParsedText(None, "Plain answer")


def test_a_name_is_first_and_arguments_follow_in_pieces():
    parser = StreamParser(tools=True, thinking=False)
    deltas = [
        parser.feed(piece) for piece in ("Hi <tool_", "call>\n", '{"name": "f", "argu', 'ments": {"a"', ": 1}", "}\n", "</tool_call>")
    ]
    assert deltas[:2] == [{"content": "Hi "}, None]
    assert deltas[2]["tool_calls"][0]["function"] == {"name": "f"}
    assert [d and d["tool_calls"][0]["function"]["arguments"] for d in deltas[3:]] == ['{"a"', ": 1}", None, None]


@pytest.mark.parametrize(
    ("prompt", "over"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True),
        ("<|im_start|>assistant\n<think>\nold\n</think>\n\nx<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n</think>so far", True),
        ("<|im_start|>assistant\n</think>x<think>", False),
    ],
)
def test_a_stream_knows_from_the_prompt_whether_thinking_is_over(prompt, over):
    tokenizer = build_tokenizer()
    assert reasoning_is_over(tokenizer.encode(prompt), tokenizer, thinking=True) is over


def test_reasoning_tokens_are_counted_without_markup():
    tokenizer = build_tokenizer()
    thought = tokenizer.encode("\nwhy not\n")
    ids = [tokenizer.id_of("<think>"), *thought, tokenizer.id_of("</think>"), *tokenizer.encode("yes")]
    assert count_reasoning(ids, tokenizer, thinking=True) == len(thought)
    assert count_reasoning(ids, tokenizer, thinking=False) == 0


def test_arguments_keep_their_value_as_json():
    arguments = {"text": 'quote " and \\ and é☕\n', "n": [1, 2.5, None, True], "nested": {"tag": "</tool>"}}
    text = f"</think>{call('f', json.dumps(arguments, ensure_ascii=False))}"
    for parsed in (parse_reply(text, tools=True), stream(text, "characters")):
        assert json.loads(parsed.tool_calls[0][1]) == arguments
