"""Long lists of ids are read in parts, and give what they give as a whole."""

import json
import random
from typing import Annotated

import msgspec
import pytest

from tests.support.reading import at_once
from tokencache.core import ids
from tokencache.engine import prompt_echo
from tokencache.engine.figures import judge_reply
from tokencache.engine.prompt_echo import read_ids, read_long_ids
from tokencache.engine.reply import Reply
from tokencache.engine.template import renderer

RNG = random.Random(5)
LONG = [RNG.randrange(150_000) for _ in range(60_000)]
TEXT = json.dumps(LONG, separators=(",", ":")).encode()
MIDDLE = TEXT.index(b",", len(TEXT) // 2)


def changed(at: int, text: bytes) -> bytes:
    return TEXT[:at] + text + TEXT[at:]


@pytest.mark.parametrize(
    "raw",
    [
        TEXT,
        json.dumps(LONG).encode(),
        json.dumps(LONG, indent=1).encode(),
        b"[]",
        b"[7]",
        changed(len(TEXT) - 1, b","),
        changed(MIDDLE, b","),
        changed(MIDDLE, b",-1"),
        changed(MIDDLE, b",1.5"),
        changed(MIDDLE, b",null"),
        changed(MIDDLE, b',"1,2"'),
        changed(MIDDLE, b",[1,2]"),
        changed(MIDDLE, b"],["),
        changed(MIDDLE, b",2147483648"),
        b"{" + TEXT[1:],
        TEXT[:-1] + b"}",
        *[changed(TEXT.index(b",", 65_536 * n), b",") for n in (1, 2, 3)],
        *[changed(TEXT.index(b",", 65_536 * n), b"]") for n in (1, 2, 3)],
        *[changed(TEXT.index(b",", 32_768 * n), text) for n in (1, 2, 3) for text in (b",", b"]")],
        changed(1, b" " * 40_000),
        changed(1, b" " * 40_000 + b","),
        changed(MIDDLE, b"," + b" " * 70_000),
        changed(len(TEXT) - 1, b" " * 70_000),
    ],
)
def test_a_list_that_is_read_in_parts_is_that_list(raw):
    for limit in (2**31, 150_000, 149_000):
        try:
            packed = ids.pack(msgspec.json.decode(raw, type=list[Annotated[int, msgspec.Meta(ge=0, lt=limit)]]))
        except ValueError:
            packed = None
        assert read_ids(raw, limit) == packed
        assert at_once(read_long_ids(b"[0," + raw + b"]", 3, 3 + len(raw), limit)) == packed


def test_each_part_is_short(monkeypatch):
    read = []
    monkeypatch.setattr(prompt_echo, "read_ids", lambda raw, limit: (read.append(len(raw)), read_ids(raw, limit))[1])
    assert at_once(read_long_ids(TEXT, 0, len(TEXT))) == ids.pack(LONG)
    assert max(read) < 66_000


BODY = b'{"choices":[{"index":0,"message":{"content":"x"},"token_ids":[5],"finish_reason":"stop"}],"prompt_token_ids":%s}'


@pytest.mark.parametrize(
    "body", [BODY % TEXT, BODY % changed(MIDDLE, b",-1"), BODY % changed(MIDDLE, b","), b'{"note":{"prompt_token_ids":%s}}' % TEXT]
)
def test_a_reply_whose_ids_are_read_ahead_is_the_same_reply(body):
    ahead, whole = Reply(), Reply()
    for reply in (ahead, whole):
        reply.prompt.limit = 149_000
    at_once(ahead.prompt.read_ahead(body))
    assert ahead.add(body) == whole.add(body)
    seen = [
        (reply.prompt.known, reply.prompt.packed, bytes(reply.prompt.fragment), reply.unreadable, judge_reply(reply, broken_off=False))
        for reply in (ahead, whole)
    ]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"count":1,"max_model_len":9,"tokens":%s}' % TEXT, LONG),
        (b'{"tokens":%s,"max_model_len":9}' % TEXT, LONG),
        (b'{"note":{"tokens":%s},"tokens":[1,2],"max_model_len":9}' % TEXT, [1, 2]),
        (b'{"note":"\\"tokens\\":[","tokens":%s,"max_model_len":9}' % TEXT, LONG),
    ],
)
def test_an_answer_of_tokenize_is_read_in_parts(answer, tokens):
    assert at_once(renderer._tokens_of(answer)) == (ids.pack(tokens), 9)


@pytest.mark.parametrize("answer", [b'{"note":{"tokens":%s}}' % TEXT, b'{"tokens":%s}' % changed(MIDDLE, b',"a"'), b'{"tokens":%s' % TEXT])
def test_an_answer_without_a_list_of_ids_is_refused(answer):
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        at_once(renderer._tokens_of(answer))
