"""Parsing completions, chunks and errors of an engine."""

import json

import pytest

from tokencache.dialects.base import parse_engine_error
from tokencache.dialects.completion_reader import read_completion

NO_MESSAGE = "the engine, or a server before it, answered 502 without a message"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (None, None),
        ("gone", (500, "gone")),
        ({}, (500, "the engine failed")),
        ({"code": 503, "message": "busy"}, (503, "busy")),
        ({"code": "x", "message": 1}, (500, "the engine failed")),
    ],
)
def test_faults(error, fault):
    assert read_completion(json.dumps({"error": error}).encode()).fault == fault


def test_calls_without_an_index_are_numbered():
    calls = [{"id": "a", "function": {"name": "f"}}, {"index": 7}, {"function": None}]
    said = read_completion(json.dumps({"choices": [{"index": 1}, {"index": 0, "message": {"tool_calls": calls}}]}).encode()).choice.reply
    assert [(n, call.name, call.arguments) for n, call in said.calls()] == [(0, "f", ""), (7, "", ""), (2, "", "")]


@pytest.mark.parametrize("data", [b"", b"oops", b"[]", b'{"choices": 5}', b"[" * 9000])
def test_what_cannot_be_read(data):
    assert read_completion(data) is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"no","type":"BadRequestError","param":"top_p","code":400}}', ("no", "BadRequestError", "top_p")),
        (b'{"message":"no","type":"X","param":null}', ("no", "X", None)),
        (b'{"error":{"message":"no","param":5}}', ("no", "upstream_error", None)),
        (b'{"detail":"Not Found"}', ('{"detail":"Not Found"}', "upstream_error", None)),
        (b"", (NO_MESSAGE, "upstream_error", None)),
        (b"<html><h1>Bad gateway</h1></html>", (NO_MESSAGE, "upstream_error", None)),
        (b"\xff", ("\ufffd", "upstream_error", None)),
    ],
)
def test_parsing_an_engine_error(body, said):
    assert parse_engine_error(502, body) == said
