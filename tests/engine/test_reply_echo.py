"""The prompt's echo is compared, not parsed: only ids that were sent are cut out, and only from the right member."""

import re

import msgspec
import pytest

from tokencache.core import ids
from tokencache.dialects.sse import EventSplitter
from tokencache.engine.figures import wrong_prompt
from tokencache.engine.prompt_echo import as_fragment, read_ids
from tokencache.engine.reply import Reply

SENT = ids.Fragment((b"1,22",)).extended(ids.pack([333]))


def reply_to(sent: tuple[bytes, ...]) -> Reply:
    reply = Reply()
    reply.prompt.sent = sent
    return reply


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"index":0}],"prompt_token_ids":[1,22,333],"prompt_text":null}',
        b'{"prompt_token_ids":[1,22,333],"choices":[{"index":0,"delta":{"content":"x"}}]}',
        b'{"choices":[{"index":0,"message":{"content":"x"},"prompt_token_ids":[1,22,333]}]}',
    ],
)
def test_an_echo_of_the_sent_ids_is_cut_out_and_known(data):
    reply = reply_to(SENT)
    brief = reply.add(data)
    assert brief == data.replace(b"[1,22,333]", b'"=0"')
    assert reply.prompt.agreed
    assert (reply.prompt.raw, reply.prompt.tokens) == (b"[1,22,333]", 3)
    assert reply.unreadable == 0


@pytest.mark.parametrize("echo", [b"[1,22,333,4]", b"[1,22,3334]", b"[1,22]", b"[1,22,33]", b"[]", b"[ 1,22,333]", b"[1,22,334]", b"null"])
def test_any_other_echo_is_read_unchanged(echo):
    reply = reply_to(SENT)
    data = b'{"choices":[],"prompt_token_ids":' + echo + b"}"
    assert reply.add(data) == data
    assert not reply.prompt.agreed
    assert reply.prompt.raw == (b"" if echo == b"null" else echo)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[],"kv_transfer_params":{"prompt_token_ids":[1,22,333]}}',
        b'{"choices":[],"kv_transfer_params":{"prompt_token_ids":[1,22,333]},"prompt_token_ids":[7]}',
        b'{"choices":[{"index":0,"delta":{"content":"\\"prompt_token_ids\\":[1,22,333]"}}]}',
    ],
)
def test_the_same_ids_elsewhere_are_left_alone(data):
    reply = reply_to(SENT)
    assert reply.add(data) == data
    assert reply.prompt.raw == (b"[7]" if b"[7]" in data else b"")


def test_an_engine_cannot_forge_the_mark():
    reply = reply_to(SENT)
    reply.add(b'{"choices":[],"prompt_token_ids":"=0"}')
    assert reply.prompt.raw == b'"=0"'
    assert read_ids(reply.prompt.raw) is None


def test_ids_that_were_not_sent_are_read():
    reply = Reply()
    reply.add(b'{"choices":[],"prompt_token_ids":[1,22,333]}')
    assert reply.prompt.raw == b"[1,22,333]"


@pytest.mark.parametrize(
    ("limit", "wrong"),
    [(0, ""), (334, ""), (333, "the prompt has the id 333, of 333 that are possible"), (5, "the prompt has the id 333, of 5")],
)
def test_an_id_that_the_model_does_not_have_is_found_and_does_not_hide_the_others(limit, wrong):
    reply = Reply()
    reply.prompt.limit = limit
    reply.add(b'{"choices":[{"index":0}],"prompt_token_ids":[1,333,22]}')
    assert reply.prompt.packed == ids.pack([1, 333, 22])
    assert wrong_prompt(reply).startswith(wrong)
    assert bool(wrong_prompt(reply)) == bool(wrong)


def test_a_truncated_echo_is_unreadable():
    reply = reply_to(SENT)
    data = b'{"choices":[],"prompt_token_ids":[1,22,333],"prom'
    assert reply.add(data) == data
    assert reply.unreadable == 1
    assert reply.prompt.raw == b""


@pytest.mark.parametrize("echo", [b"[]", b"[7]", b"[1,22,333]", b"[1, 22, 333]", b"[ 1,22]", b"[1,\n22]", b"[-0,1]"])
def test_the_engines_digits_are_sent_again_only_if_it_writes_them_as_we_do(echo):
    packed, reply = read_ids(echo), Reply()
    assert packed is not None
    reply.add(b'{"choices":[],"prompt_token_ids":' + echo + b"}")
    assert bytes(as_fragment(echo, packed)) == bytes(reply.prompt.fragment) == ids.fragment(packed)


def test_an_echo_is_the_same_fragment_however_it_comes():
    unknown, packed, same = Reply().prompt, Reply().prompt, reply_to(SENT).prompt
    packed.note_packed(ids.pack([1, 22, 333]))
    same.confirm()
    assert [bytes(prompt.fragment) for prompt in (unknown, packed, same)] == [b"", b"1,22,333", b"1,22,333"]


STREAM = b'data: {"a":1}\n\ndata: {"b":"x y"}\n\n: comment\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    "data", [STREAM, STREAM.replace(b"\n", b"\r\n"), STREAM.replace(b"\n", b"\r"), b"\n\n\n\n" + STREAM, STREAM + b"data: half"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000])
def test_events_are_the_same_however_the_stream_is_cut(data, size):
    ends = [m.end() for m in re.finditer(rb"\r\n\r\n|\n\n|\r\r", data)]
    wanted = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    splitter = EventSplitter()
    got = [event for at in range(0, len(data), size) for event in splitter.feed(data[at : at + size])]
    assert got == wanted
    assert splitter.rest == data[ends[-1] :]


def test_a_reply_with_its_echo_cut_out_has_the_same_content():
    data = msgspec.json.encode(
        {
            "choices": [{"index": 0, "message": {"content": "x"}, "token_ids": [5], "finish_reason": "stop"}],
            "prompt_token_ids": [1, 22, 333],
        }
    )
    brief, long = reply_to(SENT), Reply()
    brief.add(data)
    long.add(data)
    assert (brief.prompt.raw, brief.choices[0].ids, brief.finished) == (long.prompt.raw, long.choices[0].ids, long.finished)
