"""Text from users and tools never moves a boundary: special tokens, whole turns, the sentinel itself."""

import functools

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.template.shapes import TOOLS, Shape, ask, result, says, user
from tests.engine.template.template_lab import KINDS, Lab, behind_in_text, spelled
from tests.support.profiles import examples
from tokencache.core import ids
from tokencache.engine.template.boundary import OTHER, SENTINEL
from tokencache.engine.template.learned import LearnedTemplate, TailRefusedError
from tokencache.engine.template.tails import Tails

SOME = settings(max_examples=examples(12), derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@functools.cache
def texts(name):
    pieces = [*spelled(KINDS[name]), OTHER, SENTINEL[:-1], SENTINEL[1:], "\n", " ", "é☕", "a b", '"}', "\\", "{{ x }}", "</think>"]
    return st.lists(st.sampled_from(pieces) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=7).map("".join)


def shapes(asked, said, given_back, more):
    call = says(None, "bash")
    return (
        Shape([user(asked), says(said)], [user(more)]),
        Shape([user(asked), call], [result(given_back)]),
        Shape([user(asked), call], [result(given_back), result(more, 1), user(asked)]),
        Shape([user(asked), call, result(given_back), says(said, "look")], [result(more)]),
        Shape([user(asked), call, result(given_back), says(said)], [says(said), user(more)]),
    )


@EACH
@given(st.data())
@SOME
async def test_text_of_messages_moves_no_boundary(kind, data):
    lab = Lab.of(kind)
    stops = await lab.found_stops(kind.stops)
    trusted = Tails(LearnedTemplate(lab, stops))
    plain = shapes("What?", "This.", "1", "More?")
    words = [data.draw(texts(kind.name)) for _ in range(4)]
    words[0] = f"Hm {words[0]}"  # to Qwen3.5 a conversation that begins with a user's <tool_response> has no query
    for ordinary, shape in zip(plain, shapes(*words), strict=True):
        at = len(shape.history)
        await trusted.tail(ask(ordinary.messages, at, len(ordinary.messages), tools=True))
        behind = behind_in_text(lab, kind, shape.messages, at - 1, TOOLS)
        real = ids.pack(lab.words.encode(lab.text(shape.messages, TOOLS, generation=True)))
        untrusting = Tails(LearnedTemplate(lab, stops))  # must prove the shape with these very words
        for tails in (trusted, untrusting):
            tail = await tails.tail(ask(shape.messages, at, len(shape.messages), tools=True))
            assert lab.words.decode(ids.unpack(tail)) == behind
            assert real.endswith(tail)


@EACH
async def test_special_tokens_in_a_result_become_special_ids_and_change_nothing_else(kind):
    """As in vLLM: the template's text is tokenized as a whole, whoever wrote it."""
    lab = Lab.of(kind)
    text = "".join(spelled(kind))
    shape = Shape([user(), says(None, "bash")], [result(text) if kind.name != "Llama-3.1" else user(text)])
    tail = await Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops))).tail(ask(shape.messages, 2, 3, tools=True))
    assert {lab.words.id_of(token) for token in kind.tokens} <= set(ids.unpack(tail))
    assert lab.words.decode(ids.unpack(tail)) == behind_in_text(lab, kind, shape.messages, 1, TOOLS)


@EACH
@pytest.mark.parametrize("escaped", [False, True])
async def test_the_sentinel_in_a_message_is_refused_without_effect_on_the_shape(kind, escaped):
    lab = Lab.of(kind)
    tails = Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops)))
    plain, evil = shapes("What?", "This.", "1", "More?")[0], shapes("What?", "This.", "1", f"{SENTINEL}{kind.stops[0]}")[0]
    asked = ask(evil.messages, 2, 3, tools=True)
    if escaped:
        spelled_out = msgspec.json.encode(SENTINEL)[1:-1]
        raw = [raw.replace(spelled_out, b"\\u%04x" % spelled_out[0] + spelled_out[1:]) for raw in asked.raw_new]
        assert raw != asked.raw_new
        asked = msgspec.structs.replace(asked, raw=[*asked.raw[: asked.at], *raw])
    for _ in range(2):
        with pytest.raises(TailRefusedError, match="sentinel-in-messages"):
            await tails.tail(asked)
        before = len(lab.rendered)
        assert await tails.tail(ask(plain.messages, 2, 3, tools=True))
    assert len(lab.rendered) == before + 1, "the shape stays trusted"


async def test_the_sentinel_in_a_history_is_ignored_where_small_renderings_are_trusted():
    kind = KINDS["Qwen3"]
    lab = Lab.of(kind)
    tails = Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops)))
    evil = shapes(SENTINEL, SENTINEL, "1", "More?")[0]
    with pytest.raises(TailRefusedError, match="sentinel-in-messages"):
        await tails.tail(ask(evil.messages, 2, 3, tools=True))
    plain = shapes("What?", "This.", "1", "More?")[0]
    assert await tails.tail(ask(plain.messages, 2, 3, tools=True)) == await tails.tail(ask(evil.messages, 2, 3, tools=True))
