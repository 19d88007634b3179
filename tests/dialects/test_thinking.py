"""Inline thinking: split off for dialects that have a field for it, and put back as the engine wrote it."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.dialects.test_chunk_unparsed import ENCODERS, HANDLE, chunk, responses, written
from tests.support.reading import at_once
from tokencache.core.messages import Message, digest
from tokencache.core.verdict import judge
from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder
from tokencache.dialects.anthropic.request import read_history
from tokencache.dialects.gemini.reply import GeminiReplyEncoder
from tokencache.dialects.gemini.request import Contents
from tokencache.dialects.gemini.vocabulary import entry
from tokencache.dialects.responses.request import ItemMessages
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import CLOSED, NOT_IN_TEXT, UNCLOSED, Thinking, folded, in_text, read_signature, signed

PIECES = ["<think>", "</think>", "<th", "ink>", "</th", "<", ">", "\n", " ", "Hm.", "Yes", "</", "é"]
contents = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
thinking_contents = st.builds("<think>{}".format, contents)
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def completion(content, *, calls=False, finish="stop", **more):
    message = {"role": "assistant", "content": content, **({"tool_calls": [CALL]} if calls else {}), **more}
    return written({"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def cut(content, places):
    """A text in pieces."""
    marks = sorted({place % (len(content) + 1) for place in places} | {0, len(content)})
    return [content[a:b] for a, b in itertools.pairwise(marks)]


def parted(hear, chunks):
    """The thinking and the text that come out of some chunks."""
    said = [heard.choice.reply for data in chunks if (heard := hear(data)) is not None and heard.choice is not None]
    return "".join(one.thought for one in said), "".join(one.content or "" for one in said)


@pytest.mark.parametrize(
    ("content", "expected", "mark"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", ("\nHm.\n", "\n\nYes."), CLOSED),
        ("<think>Hm", ("Hm", ""), UNCLOSED),
        ("<think>Hm</thin", ("Hm</thin", ""), UNCLOSED),
        ("<think></think>Yes.", ("", "Yes."), CLOSED),
        ("<think>a</think><think>b</think>", ("a", "<think>b</think>"), CLOSED),
        ("Yes <think>Hm.</think>", ("", "Yes <think>Hm.</think>"), NOT_IN_TEXT),
        ("\n<think>Hm.</think>", ("", "\n<think>Hm.</think>"), NOT_IN_TEXT),
        ("<thin", ("", "<thin"), NOT_IN_TEXT),
        ("Hm.</think>Yes.", ("", "Hm.</think>Yes."), NOT_IN_TEXT),
        ("", ("", ""), NOT_IN_TEXT),
    ],
)
def test_where_thinking_ends(content, expected, mark):
    thinking = Thinking()
    assert parted(thinking.read, [completion(content)]) == expected
    assert thinking.mark == mark


@given(content=contents | thinking_contents, places=st.lists(st.integers(0, 60), max_size=6), calls=st.booleans())
@example(content="<think>Hm.</think>Yes", places=[3, 9, 12], calls=True)
def test_a_stream_is_split_like_the_whole_reply(content, places, calls):
    whole, streamed = Thinking(), Thinking()
    pieces = [written(chunk({"content": piece})) for piece in cut(content, places)]
    ending = [written(chunk({"content": None, "tool_calls": [{"index": 0, **CALL}]}))] if calls else []
    last = [written(chunk({}, finish="stop"))]
    found = parted(whole.read, [completion(content, calls=calls)])
    assert parted(streamed.read, [*pieces, *ending, *last]) == found
    assert streamed.mark == whole.mark
    assert "".join(found) in (content, content.replace("<think>", "", 1).replace("</think>", "", 1))  # nothing is lost


@given(content=contents | thinking_contents)
def test_thinking_is_put_back_as_it_was(content):
    thinking = Thinking()
    thought, text = parted(thinking.read, [completion(content)])
    message = {"role": "assistant", "content": text, **({"reasoning": thought} if thought else {})}
    told = folded(message, thinking.mark)["content"]
    assert told == content if thought or not thinking.mark else content == f"<think>{'</think>' if thinking.mark == CLOSED else ''}{told}"


def test_reasoning_of_an_engine_with_a_parser_is_unchanged():
    thinking = Thinking()
    assert parted(thinking.read, [completion("<think>x</think>Yes.", reasoning="Hm.")]) == ("Hm.", "<think>x</think>Yes.")
    assert thinking.mark == NOT_IN_TEXT
    thinking = Thinking()
    chunks = [written(chunk(delta)) for delta in ({"reasoning": "Hm."}, {"content": "<think>"}, {"content": "x"})]
    assert parted(thinking.read, chunks) == ("Hm.", "<think>x")


def test_the_opaque_member():
    for mark in (NOT_IN_TEXT, CLOSED, UNCLOSED):
        assert read_signature(signed(HANDLE, mark)) == (HANDLE, mark)
    for strange in ("", None, 7, HANDLE[1:], HANDLE + "x", HANDLE.upper(), "inln"):
        assert read_signature(strange) == ("", NOT_IN_TEXT)


def test_as_gym_reads_it():
    """Thinking of another model, or from a client that lost the mark, goes into the text that Gym's server reads."""
    for content in ("Yes.", None, ""):
        told = json.loads(in_text(written({"role": "assistant", "content": content, "reasoning": "Hm."})))
        assert told == {"role": "assistant", "content": f"<think>Hm.</think>{content or ''}"}
    told = json.loads(in_text(written({"role": "assistant", "content": [{"type": "text", "text": "Yes."}], "reasoning": "Hm."})))
    assert [part["text"] for part in told["content"]] == ["<think>Hm.</think>", "Yes."]
    assert json.loads(in_text(b'{"role":"assistant","content":"Yes.","reasoning":null}')) == {"role": "assistant", "content": "Yes."}
    for same in (b'{"role": "user", "content": "the \\"reasoning\\""}', b'{"role":"user","content":"x","reasoning":"y"}'):
        assert in_text(same) == same


# ---- through a dialect and back, as a client sends back what it was given


def back_from_messages(content, *, calls, finish):
    reply = json.loads(AnthropicReplyEncoder("m", HANDLE).whole(completion(content, calls=calls, finish=finish)))
    history = at_once(read_history(None, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply["content"]}]))
    kinds = [block["type"] for block in reply["content"]]
    return kinds, history.messages[1], history.handles.get(1)


def back_from_responses(content, *, calls, finish, sealed):
    reply = json.loads(responses(sealed=sealed).whole(completion(content, calls=calls, finish=finish)))
    translated = ItemMessages()
    for place, item in enumerate(reply["output"]):
        translated.add(item, ("input", place))
    translated.close()
    kinds = [{"reasoning": "thinking", "message": "text", "function_call": "tool_use"}[item["type"]] for item in reply["output"]]
    return kinds, translated.messages[0] if translated.messages else {"role": "assistant"}, translated.handles.get(0)


def back_from_gemini(content, *, calls, finish):
    encoder = GeminiReplyEncoder(model="m", handle=HANDLE, shows_thoughts=True, sse=True)
    reply = json.loads(encoder.whole(completion(content, calls=calls, finish=finish)))
    said = reply["candidates"][0]["content"]
    translated = Contents()
    translated.add(entry(said, "contents[0]"))
    translated.close()
    kinds = ["thinking" if part.get("thought") else "text" if "text" in part else "tool_use" for part in said["parts"]]
    return kinds, translated.messages[0], translated.handles.get(0)


DIALECTS = {
    "messages": back_from_messages,
    "responses": lambda *asked, **how: back_from_responses(*asked, **how, sealed=False),
    "responses, sealed": lambda *asked, **how: back_from_responses(*asked, **how, sealed=True),
    "gemini": back_from_gemini,
}


@pytest.mark.parametrize("calls", [False, True], ids=["words", "calls"])
@pytest.mark.parametrize("dialect", DIALECTS)
@given(thought=contents.filter(lambda text: text and "</think>" not in text), text=contents)
def test_an_echoed_reply_equals_the_engine_s_text(dialect, calls, thought, text):
    content = f"<think>{thought}</think>{text}"
    kinds, message, handle = DIALECTS[dialect](content, calls=calls, finish="stop")
    if text or calls or dialect != "responses":  # there an id alone says where the thinking stood: see `test_cut_off_in_its_thinking`
        assert message.get("content") == content
    assert "reasoning" not in message
    assert handle == HANDLE
    assert kinds == ["thinking", *(["text"] if text or (dialect == "gemini" and not calls) else []), *(["tool_use"] if calls else [])]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(thought=contents.filter(lambda text: text and "</think>" not in text))
def test_a_reply_cut_off_while_thinking(dialect, thought):
    content = f"<think>{thought}"
    kinds, message, handle = DIALECTS[dialect](content, calls=False, finish="length")
    assert message["content"] == content
    assert handle == HANDLE
    assert kinds[0] == "thinking"


@pytest.mark.parametrize("dialect", DIALECTS)
@given(text=contents.filter(lambda text: text and not text.startswith("<think>")))
def test_text_without_thinking_is_unchanged(dialect, text):
    kinds, message, _ = DIALECTS[dialect](text, calls=False, finish="stop")
    assert message == {"role": "assistant", "content": text}
    assert kinds == ["text"]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(thought=contents.filter(lambda text: text and "</think>" not in text), text=contents.filter(str.strip))
def test_an_echoed_reply_is_recognized(dialect, thought, text):
    """Whether thinking comes back with its mark, without it, or not at all."""
    content = f"<think>{thought}</think>{text}"
    served = Message("assistant", content)
    _, message, _ = DIALECTS[dialect](content, calls=False, finish="stop")
    for echoed in (Message("assistant", message["content"]), Message("assistant", text, thought), Message("assistant", text)):
        if "<think>" in text[:20]:  # what begins like thinking is taken for thinking once the block before it is gone
            continue
        assert digest(echoed) == digest(served)
        verdict = judge(served, echoed)
        assert verdict.supplied
        assert (verdict.kind == "same") == (echoed.content == content)


@pytest.mark.parametrize("dialect", ENCODERS)
@pytest.mark.parametrize("begins", [["<think>", "Hm", "</thi", "nk>", "Yes"], ["<think>Hm</think>Yes"]])
def test_text_after_the_thinking_is_passed_on_unparsed(dialect, begins):
    encoder = ENCODERS[dialect]()
    for piece in begins:
        data = written(chunk({"content": piece}))
        encoder.chunk(event_of(data), data, 3)
    assert encoder.chunk_unparsed(event_of(written(chunk({"content": "more"})))) is not None
