"""The Anthropic dialect: which requests it matches, models, errors, and bodies of any kind."""

import json

import pytest
from anthropic.types import ModelInfo
from anthropic.types.beta_error_response import BetaErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from tests.dialects.anthropic.kit import asked, read
from tests.support.profiles import examples
from tokencache.dialects import json_io
from tokencache.dialects.anthropic.routes import AnthropicDialect
from tokencache.dialects.base import DirectReply, ModelCall, ServedModel, TokenCount
from tokencache.errors import HarnessError

DIALECT = AnthropicDialect()
THEIRS = CIMultiDict({"Anthropic-Version": "2023-06-01"})
SERVED = (ServedModel("sim", 4096), ServedModel("org/model v2"))


@pytest.mark.parametrize(
    ("method", "path", "headers", "ours"),
    [
        ("POST", "/v1/messages", {}, True),
        ("POST", "/v1/messages/count_tokens", {}, True),
        ("POST", "/v1/messages/batches", {}, False),
        ("GET", "/v1/messages", {}, False),
        ("GET", "/v1/models", THEIRS, True),
        ("GET", "/v1/models/sim", THEIRS, True),
        ("GET", "/v1/models", CIMultiDict(), False),
        ("GET", "/v1/modelsx", THEIRS, False),
        ("POST", "/v1/models", THEIRS, False),
        ("POST", "/v1/chat/completions", THEIRS, False),
    ],
)
def test_which_requests_it_matches(method, path, headers, ours):
    assert DIALECT.matches(method, path, headers) is ours


async def test_the_list_of_models():
    answer = await read(path="/v1/models", method="GET", served=SERVED)
    assert isinstance(answer, DirectReply)
    found = json.loads(answer.body)
    assert [ModelInfo.model_validate(model).id for model in found["data"]] == ["sim", "org/model v2"]
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("sim", "org/model v2", False)
    assert found["data"][0]["max_input_tokens"] == 4096
    assert json.loads((await read(path="/v1/models", method="GET")).body) == {
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize("path", ["sim", "org/model%20v2", "org%2Fmodel%20v2"])
async def test_one_model(path):
    answer = await read(path=f"/v1/models/{path}", method="GET", served=SERVED)
    assert ModelInfo.model_validate(json.loads(answer.body)).id in {"sim", "org/model v2"}


async def test_an_unknown_model():
    with pytest.raises(HarnessError, match="model: claude-opus-4-1") as missing:
        await read(path="/v1/models/claude-opus-4-1", method="GET", served=SERVED)
    assert missing.value.status == 404


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors(status, kind):
    body = json.loads(DIALECT.error(status, "no \ud800", "BadRequestError", "messages"))
    assert body == {"type": "error", "error": {"type": kind, "message": "no \ufffd"}}
    if status != 413:  # said by the API's front, unknown to the SDK's types
        BetaErrorResponse.model_validate({**body, "request_id": None})


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "This model's maximum context length is 65536 tokens. However, your prompt contains at least 65537 input tokens, which",
            "prompt is too long: 65537 tokens > 65536 maximum",
        ),
        ("Input length (70000) exceeds model's maximum context length (65536).", "prompt is too long: 70000 tokens > 65536 maximum"),
        ("temperature must be non-negative, got -1.0.", "temperature must be non-negative, got -1.0."),
    ],
)
def test_a_prompt_that_is_too_long_has_anthropic_s_message(said, shown):
    assert json.loads(DIALECT.error(400, said, "BadRequestError"))["error"]["message"] == shown


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"oops",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b'{"a":NaN}',
        b'{"a":1e999}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"9" * 6000 + b"}",
    ],
)
async def test_bodies_that_are_not_objects(body):
    with pytest.raises(HarnessError) as refused:
        await read(body)
    assert refused.value.status == 400


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [1, 50, 200, 400, 600, 900])
async def test_deep_inputs_are_read_or_refused(depth):
    deep = {"type": "tool_use", "id": "c", "name": "t", "input": nested(depth)}
    body = {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "assistant", "content": [deep]}],
        "tools": [{"name": "t", "input_schema": nested(depth)}],
    }
    try:
        assert isinstance(await read(body), ModelCall)
    except HarnessError as refused:
        assert depth > 100, refused  # noqa: PT017 - either is right


def test_what_is_too_deep_to_write_is_refused():
    with pytest.raises(HarnessError, match="nested too deeply"):
        json_io.write(nested(100_000))


async def test_a_thousand_tools_and_calls_of_one_id():
    calls = [{"type": "tool_use", "id": "c", "name": f"t{i}", "input": {}} for i in range(1000)]
    results = [{"type": "tool_result", "tool_use_id": "c", "content": str(i)} for i in range(1000)]
    tools = [{"name": f"t{i}", "input_schema": {}} for i in range(1000)]
    history = [{"role": "user", "content": results}, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    chat = json.loads((await read({"model": "m", "max_tokens": 1, "messages": history, "tools": tools})).body)
    assert [len(chat["tools"]), len(chat["messages"]), len(chat["messages"][1000]["tool_calls"])] == [1000, 2001, 1000]


async def test_halves_of_characters_become_fffd():
    entries = b'[{"role":"user","content":"a \\ud800 b \xc3\xa9"},{"role":"user","content":"\xc3\xa9"}]'
    spoken = await read(b'{"model":"\\ud800","max_tokens":1,"messages":%s}' % entries)
    assert json.loads(spoken.body)["messages"][0]["content"] == "a \ufffd b é"
    assert b'{"role":"user","content":"\xc3\xa9"}' in spoken.body
    assert "\ufffd".encode() in spoken.encoder.chunk(b"", b'{"choices":[]}', 1)


KINDS = [
    "text",
    "image",
    "document",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "tool_reference",
    "tool_addition",
    "tool_removal",
    "server_tool_use",
    "wibble",
]
NAMES = [
    "text",
    "type",
    "source",
    "content",
    "input",
    "id",
    "name",
    "thinking",
    "signature",
    "tool_use_id",
    "data",
    "tool_name",
    "cache_control",
]
LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(KINDS)
)
ANY = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
BLOCK = st.fixed_dictionaries({"type": st.sampled_from(KINDS)}, optional={name: ANY for name in NAMES if name != "type"}) | ANY
CONTENT = st.lists(BLOCK, max_size=4) | ANY
ENTRY = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": CONTENT}) | ANY
TOOL = st.fixed_dictionaries({"name": st.text(max_size=3) | ANY, "input_schema": st.dictionaries(st.text(max_size=3), ANY) | ANY}) | ANY
BODY = st.fixed_dictionaries(
    {"model": st.just("m") | ANY, "max_tokens": st.just(9) | ANY, "messages": st.lists(ENTRY, max_size=4) | ANY},
    optional={
        **dict.fromkeys(
            ["temperature", "top_p", "top_k", "stop_sequences", "thinking", "output_config", "tool_choice", "stream", "mcp_servers"], ANY
        ),
        "system": CONTENT,
        "tools": st.lists(TOOL, max_size=3) | ANY,
    },
)


@settings(max_examples=examples(400))
@given(BODY | ANY, st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]))
async def test_any_json_is_read_or_refused(body, path):
    sent = asked(json.dumps(body).encode("utf-8", "surrogatepass"), path=path)
    try:
        meaning = await DIALECT.parse(sent)
    except HarnessError as refused:
        json.loads(DIALECT.error(refused.status, str(refused), refused.kind, refused.param))
    else:
        assert isinstance(meaning, ModelCall | TokenCount)
        assert isinstance(json.loads(meaning.body)["messages"], list)


@settings(max_examples=examples(200))
@given(st.binary(max_size=60))
async def test_any_bytes_are_refused(body):
    with pytest.raises(HarnessError):
        await DIALECT.parse(asked(body))
