"""A call's arguments have the same value in chat as in the request, whatever dialect the request was written in.

vLLM reads arguments with Python's `json`, so that is what the value is read with here.
"""

import json

import pytest

from tests.dialects.anthropic import kit as messages
from tests.dialects.gemini import kit as gemini
from tests.dialects.responses import kit as responses

OBJECTS = {
    "beyond 64 bits": '{"a": [123456789012345678901234567890, -18446744073709551616, 9007199254740993]}',
    "400 digits": f'{{"a": {"9" * 400}}}',
    "floats": '{"a": [1.0, 1e22, 1E-7, 1.50, -0.0, 5e-324, 0.1000000000000000055511151231257827]}',
    "zero with a sign": '{"a": -0}',
    "a key twice": '{"a": 1, "b": 2, "a": {"c": 1, "c": 1.0}}',
    "the order of keys": '{"z": 1, "a": 2, "M": {"b": null, "a": ""}}',
    "escapes": r'{"a": "\u00e9\ud83d\ude00\u0000\u2028\"\\\/", "\u00fc": true}',
    "empty": "{}",
}
"""Objects as a harness writes them into its request."""

TEXTS = {**OBJECTS, "NaN": '{"a": NaN}', "beyond every double": '{"a": 1e999}', "half a character": r'{"a": "\ud83d"}', "cut off": '{"a'}
"""Texts: where arguments are one, all of it stays."""


def called(chat):
    """The arguments of the only call in a chat request."""
    ((call,),) = [message["tool_calls"] for message in chat["messages"] if message.get("tool_calls")]
    return call["function"]["arguments"]


def value(text):
    return repr(json.loads(text))  # 1 and 1.0, 0.0 and -0.0 are equal, and no template writes them alike


@pytest.mark.parametrize("given", OBJECTS.values(), ids=OBJECTS)
async def test_messages(given):
    block = f'{{"type":"tool_use","id":"c","name":"f","input":{given}}}'
    body = f'{{"model":"m","max_tokens":9,"messages":[{{"role":"assistant","content":[{block}]}}]}}'
    assert value(called(json.loads((await messages.read(body.encode())).body))) == value(given)


@pytest.mark.parametrize("given", OBJECTS.values(), ids=OBJECTS)
def test_gemini(given):
    body = f'{{"contents":[{{"role":"model","parts":[{{"functionCall":{{"name":"f","args":{given}}}}}]}}]}}'
    assert value(called(json.loads(gemini.read(body.encode()).body))) == value(given)


@pytest.mark.parametrize("given", TEXTS.values(), ids=TEXTS)
async def test_responses(given):
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": given}
    assert called(await responses.Session().chat(input=[item])) == given


@pytest.mark.parametrize("given", TEXTS.values(), ids=TEXTS)
async def test_wrapped_messages_arguments_are_unwrapped(given):
    """They come back wrapped, and are unwrapped to the letter."""
    wrapped = {"type": "tool_use", "id": "c", "name": "f", "input": {"__unparsed_arguments": given}}
    assert called(await messages.chat_of(messages=[{"role": "assistant", "content": [wrapped]}])) == given
