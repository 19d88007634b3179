"""Numbers and truth values of a request: read as vLLM reads them, or refused."""

import json

import msgspec
import pytest

from tokencache.dialects.chat.scalars import normalize
from tokencache.dialects.json_io import fields_of
from tokencache.errors import HarnessError


def settled(name, value, **more):
    fields = fields_of(b'{"%b": %b}' % (name.encode(), value.encode()))
    normalize(fields, **more)
    return bytes(fields[name]).decode()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", {"5": "5", '"5"': "5", "5.0": "5", "5e0": "5", "-0": "-0", '"-5"': "-5", "null": "null"}),
        ("top_logprobs", {"-0.0": "0", "2.0": "2", "null": "null"}),
        ("temperature", {"0.70": "0.70", "1e-1": "1e-1", '"0.5"': "0.5", '"1"': "1.0", "7": "7", "null": "null"}),
        ("stream", {"true": "true", "0": "false", "1.0": "true", "-0.0": "false", "null": "null"}),
        ("stop_token_ids", {"[1, 2]": "[1, 2]", "[]": "[]", "null": "null"}),
        ("logit_bias", {'{"1": 2, "3": -0.5}': '{"1": 2, "3": -0.5}', "{}": "{}"}),
        ("stream_options", {'{"include_usage": 1, "a": [1]}': '{"include_usage":true,"a":[1]}', '{"a": 1}': '{"a": 1}', "null": "null"}),
        ("unknown", {"NaN": "NaN"}),
    ],
)
def test_a_clear_value_is_written_as_what_it_means(name, values):
    assert {value: settled(name, value) for value in values} == values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", ["true", "2.5", '" 2"', '"1_0"', '"2.0"', '""', "[1]", "{}", "NaN", "1e999", "1e30", '"\\ud800"', '"٣"']),
        ("top_logprobs", ['"2"', "false"]),
        ("temperature", ["true", '"nan"', '"inf"', "NaN", '"1e3"', "[]"]),
        ("use_beam_search", ["2", '"true"', '"off"', "[]", "{}"]),
        ("stop_token_ids", ['["5"]', "[true]", "[1.0]", "[null]", "5", "{}"]),
        ("logit_bias", ['{"1": "2"}', '{"1": true}', '{"1": NaN}', "[]"]),
        ("stream_options", ["[]", "1", "NaN", '{"include_usage": "off"}', '{"a": NaN}', '{"a": "\\ud800"}']),
    ],
)
def test_a_value_that_is_not_clear_is_refused(name, values):
    for value in values:
        with pytest.raises(HarnessError, match=f"'{name}' must be") as refused:
            settled(name, value)
        assert refused.value.param == name


def test_log_probabilities_are_a_number_in_text_completions():
    assert settled("logprobs", "1") == "true"
    assert settled("logprobs", "1.0", chat=False) == "1"
    with pytest.raises(HarnessError):
        settled("logprobs", "true", chat=False)


def test_other_members_keep_their_bytes():
    body = b'{"messages": [1.0], "chat_template_kwargs": {"a": 1.0}, "temperature": 1e0, "stop": ["a"]}'
    fields = fields_of(body)
    normalize(fields)
    assert json.loads(msgspec.json.encode(fields)) == json.loads(body)
    assert bytes(fields["temperature"]) == b"1e0"
