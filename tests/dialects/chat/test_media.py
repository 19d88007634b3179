"""Messages with images: their digests are equal exactly if a template and a vision encoder cannot distinguish them."""

import base64
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import MANY
from tokencache.core import evidence
from tokencache.core.chain import build_conversation, turn_keys
from tokencache.core.match import Hit, match
from tokencache.core.messages import digest
from tokencache.core.rules import STRICT
from tokencache.core.turn import Turn
from tokencache.dialects.chat import vocabulary
from tokencache.dialects.chat.vocabulary import MessageReader, read_message

PICTURES = [b"one", b"two", b"one "]
SPELLINGS = [
    lambda text: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
    lambda text: {"type": "image_url", "image_url": {"url": f"data:image/jpeg;charset=x;base64,{text[:3]}\n{text[3:]}"}},
    lambda text: {"type": "image_url", "image_url": {"url": f"data:;base64,{text.rstrip('=')}", "detail": "auto"}, "cache_control": {}},
]


def image(picture, spelling=0):
    return SPELLINGS[spelling](base64.b64encode(picture).decode())


def text(words):
    return {"type": "text", "text": words}


PIECES = st.one_of(
    st.tuples(st.just("text"), st.sampled_from(["a", "b", "a\nb", " "])), st.tuples(st.just("image"), st.sampled_from(PICTURES))
)
MEANINGS = st.lists(PIECES, min_size=1, max_size=4)


def written(meaning, draw):
    """A message with this meaning, each image in some spelling."""
    return {"role": "user", "content": [text(v) if kind == "text" else image(v, draw(st.sampled_from([0, 1, 2]))) for kind, v in meaning]}


def exact_of(entry):
    [read] = MessageReader().read([json.dumps(entry).encode()])
    return read.exact


def wrong(one, other, data):
    """The checker: what is wrong with the digests of two messages with these meanings."""
    messages = [written(meaning, data.draw) for meaning in (one, other)]
    exacts = [exact_of(entry) for entry in messages]
    digests = [digest(read_message(entry)) for entry in messages]
    found = []
    if (exacts[0] == exacts[1]) != (one == other):
        found.append("exact")
    if (one == other and digests[0] != digests[1]) or (
        any(kind == "image" for kind, _ in (*one, *other)) and one != other and digests[0] == digests[1]
    ):
        found.append("digest")
    return found


@MANY
@given(MEANINGS, MEANINGS, st.data())
def test_digests_are_equal_exactly_if_texts_and_images_are_equal_in_their_order(one, other, data):
    assert wrong(one, other, data) == []
    assert wrong(one, one, data) == []
    assert wrong(one, one[::-1], data) == []


def _by_url(part):
    return {"\x00media": {"written": part}}


def _blind(part):
    return {"\x00media": {"image": True}}


@pytest.mark.parametrize("careless", [_by_url, _blind])
def test_the_checker_convicts_a_careless_identity(monkeypatch, careless):
    monkeypatch.setattr(vocabulary, "media_identity", careless)

    class Draw:
        def __init__(self):
            self.drawn = 0

        def draw(self, _strategy):
            self.drawn += 1
            return self.drawn % 3

    one = [("text", "a"), ("image", PICTURES[0])]
    other = [("text", "a"), ("image", PICTURES[1])]
    assert wrong(one, one, Draw()) + wrong(one, other, Draw()) != []


def test_an_image_between_texts_is_not_one_after_them():
    between, after = [text("a"), image(b"one"), text("b")], [text("a"), text("b"), image(b"one")]
    one, other = ({"role": "user", "content": content} for content in (between, after))
    assert digest(read_message(one)) != digest(read_message(other))
    assert exact_of(one) != exact_of(other)


def test_messages_without_media_keep_their_digests():
    """Stored sessions are still found: the values are those of earlier releases."""
    parts = {"role": "user", "content": [text("a"), text("b")]}
    assert digest(read_message(parts)).hex() == "5619be2bfcb17bf1012bfbac450ccd0c"
    assert exact_of(parts).hex() == "f7079bd001dd8bb37d6d5232d6e5c87a"


# --- what harnesses do to images, and what becomes of the conversation ---


def user(*content):
    return {"role": "user", "content": list(content)}


def call(name, tool="shot"):
    return {"role": "assistant", "content": None, "tool_calls": [{"id": name, "function": {"name": tool, "arguments": "{}"}}]}


def result(name, *content):
    return {"role": "tool", "tool_call_id": name, "content": list(content)}


FIRST = user(text("Look."), image(b"one"))
CALLS = [call("call_7d1e40aa"), call("toolu_93bf21c0")]
SHOTS = [result("call_7d1e40aa", image(b"two")), result("toolu_93bf21c0", image(b"three"))]


class Index(dict):
    """What was recorded of a session whose two replies each call a tool."""

    def __init__(self):
        super().__init__()
        self.turns, self._reader = {}, MessageReader()
        for name, history, reply in (("a", [FIRST], CALLS[0]), ("b", [FIRST, CALLS[0], SHOTS[0]], CALLS[1])):
            self._record(name, self.conversation(history), read_message(reply))

    def conversation(self, history):
        read = self._reader.read(map(msgspec.json.encode, history))
        return build_conversation(b"", [r.message for r in read], [r.digest for r in read], [r.exact for r in read])

    def _record(self, name, conversation, served):
        until = len(conversation.messages)
        parent = self.turns.get("a")
        turn = self.turns[name] = Turn(
            id=name,
            call=name,
            match="continue" if parent else "root",
            parent=parent and parent.id,
            served=served,
            prefix_hash=name.encode(),
            completion_hash=name.encode(),
            position_key=conversation.chain[-1],
            judged=evidence.judged_hash(conversation, until, STRICT, {}),
            foreign=evidence.foreign_hash(conversation, parent.messages + 1 if parent else 0, until, (), parent.foreign if parent else b""),
            before=evidence.preceding_hash(conversation, until),
            messages=until,
        )
        for key in turn_keys(conversation, served, digest(served), handle="", leniency=STRICT):
            self.setdefault(key, []).append(Hit(turn))

    def match(self, *history):
        found = match(self.conversation(history), self)
        return match(self.conversation(history), self, turns=self.turns) if found.turns_wanted else found

    def verdict(self, *history):
        """The kind of match, the parent, and the replies that keep their exact ids beyond those of the parent."""
        found = self.match(*history)
        return found.kind, found.parent and found.parent.id, [hit.turn.id for _, hit in found.anchors]


CONTINUES = ("continue", "b", [])
FIRST_WITH = {
    "the same bytes": (FIRST, CONTINUES),
    "base64 in lines": (user(text("Look."), image(b"one", 1)), CONTINUES),
    "no padding, a cache mark": (user(text("Look."), image(b"one", 2)), CONTINUES),
    "encoded again or scaled": (user(text("Look."), image(b"one, smaller")), ("resplice", None, ["a", "b"])),
    "another detail": (
        user(text("Look."), {"type": "image_url", "image_url": {**image(b"one")["image_url"], "detail": "low"}}),
        ("resplice", None, ["a", "b"]),
    ),
    "evicted": (user(text("Look."), text("[image removed]")), ("resplice", None, ["a", "b"])),
    "dropped": (user(text("Look.")), ("resplice", None, ["a", "b"])),
    "before the text": (user(image(b"one"), text("Look.")), ("resplice", None, ["a", "b"])),
    "twice": (user(text("Look."), image(b"one"), image(b"one")), ("resplice", None, ["a", "b"])),
}


@pytest.mark.parametrize("name", FIRST_WITH)
def test_what_a_harness_does_to_an_image_has_a_verdict(name):
    first, expected = FIRST_WITH[name]
    assert Index().verdict(first, CALLS[0], SHOTS[0], CALLS[1], SHOTS[1]) == expected


def test_an_evicted_screenshot_leaves_the_prefix_before_it_and_the_replies_after_it_exact():
    evicted = result("call_7d1e40aa", text("[screenshot removed]"))
    assert Index().verdict(FIRST, CALLS[0], evicted, CALLS[1], SHOTS[1]) == ("resplice", "a", ["b"])


def test_an_image_that_moved_to_another_message_is_a_changed_context():
    moved = [user(text("Look.")), CALLS[0], result("call_7d1e40aa", image(b"one"), image(b"two")), CALLS[1], SHOTS[1]]
    assert Index().verdict(*moved) == ("resplice", None, ["a", "b"])
    beside = [FIRST, CALLS[0], result("call_7d1e40aa", text("See below.")), user(image(b"two")), CALLS[1], SHOTS[1]]
    assert Index().verdict(*beside) == ("resplice", "a", ["b"])
