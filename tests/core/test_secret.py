"""The deployment's secret is in every key that a conversation is found under, and in nothing that a trainer gets."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.support.reading import read_chat
from tokencache.core.chain import aborted_turn_keys, build_conversation, extend, lookup_keys, turn_keys
from tokencache.core.messages import Message, ToolCall, digest, exact_digest
from tokencache.dialects.chat.incremental import IncrementalParser

TEXT = st.text(max_size=12)
REPLY = st.builds(
    lambda text, calls: Message("assistant", text, calls=tuple(ToolCall(f"call_{i}{name}", name, "{}") for i, name in enumerate(calls))),
    TEXT,
    st.lists(st.text(st.characters(categories=["Ll"]), min_size=1, max_size=4), max_size=2),
)
HISTORY = st.lists(st.builds(lambda user, reply: (Message("user", user), reply), TEXT, REPLY), min_size=1, max_size=4)
SECRETS = st.tuples(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32)).filter(lambda two: two[0] != two[1])


def every_key(history, secret):
    """All keys under which the last reply is stored, and all that are looked up to find it again."""
    *before, (user, reply) = history
    messages = [message for pair in before for message in pair]
    asked = build_conversation(b"scope", [*messages, user], model=b"voice", secret=secret)
    stored = {*turn_keys(asked, reply, digest(reply), handle="handle"), *aborted_turn_keys(asked)}
    added = [reply, Message("user", "go on")]
    echoed = extend(asked, added, list(map(digest, added)), list(map(exact_digest, added)))
    return stored, set(lookup_keys(echoed, handles={len(messages) + 1: "handle"}))


@given(HISTORY, SECRETS)
def test_two_secrets_share_no_key(history, two):
    (one_stored, one_wanted), (other_stored, other_wanted) = (every_key(history, secret) for secret in two)
    assert not (one_stored | one_wanted) & (other_stored | other_wanted)


@given(HISTORY, st.binary(min_size=32, max_size=32))
def test_replicas_with_one_secret_find_what_the_other_stored(history, secret):
    stored, looked_up = every_key(history, secret)[0], every_key(history, secret)[1]
    assert {key[:1] for key in stored & looked_up} >= {b"c", b"r", b"h"}
    assert all(len(key) == 17 for key in stored | looked_up)


@given(HISTORY, SECRETS)
def test_what_was_read_of_a_body_has_the_secret_in_it(history, two):
    told = [{"role": m.role, "content": m.content or ""} for pair in history for m in pair]
    body = json.dumps({"model": "m", "messages": told, "tools": []}).encode()
    chains = []
    for secret in two:
        bodies = IncrementalParser()
        bodies.secret = secret
        whole = read_chat(body, bodies, "s").conversation
        more = json.dumps({"model": "m", "messages": [*told, {"role": "user", "content": "x"}], "tools": []}).encode()
        assert read_chat(more, bodies, "s").conversation.chain[: len(whole.chain)] == whole.chain
        chains.append({*whole.chain, whole.model_key, whole.salt})
    assert not chains[0] & chains[1]
