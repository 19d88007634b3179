"""Settings, labels and rewards: digests, bounds, and what JSON may contain."""

import math
from functools import reduce

import msgspec
import pytest

from tokencache.core.session import MAX_METADATA, Budget, LabelChanges, Labels, Reward, SessionSettings

FULL = SessionSettings("codex", {"gpt-*": "ü"}, {"temperature": 1.0, "top_p": None}, Budget(calls=3), "me", "follow", 2e9, 60.0)


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])
@pytest.mark.parametrize("settings", [FULL, SessionSettings(), SessionSettings(sampling={"seed": 1})])
def test_a_digest_survives_every_encoding(codec, settings):
    read = codec.decode(codec.encode(settings), type=SessionSettings)
    assert (read, read.digest) == (settings, settings.digest)
    spelled_out = msgspec.json.decode(msgspec.json.encode(msgspec.structs.asdict(settings)), type=SessionSettings)
    assert spelled_out.digest == settings.digest


def test_digests_differ_where_settings_differ():
    others = [msgspec.structs.replace(FULL, **{name: getattr(SessionSettings(), name)}) for name in FULL.__struct_fields__]
    assert len({one.digest for one in (FULL, *others)}) == 9
    assert [FULL.differences(other) for other in others] == [(name,) for name in FULL.__struct_fields__]
    assert (SessionSettings().digest, bool(SessionSettings()), bool(FULL)) == (b"", False, True)


def test_the_order_of_members_does_not_matter():
    one = SessionSettings(sampling={"a": 1, "b": {"c": 2, "d": 3}})
    assert one.digest == SessionSettings(sampling={"b": {"d": 3, "c": 2}, "a": 1}).digest


LABELS = [
    ({"group": "x" * 201}, "group"),
    ({"group": "a\nb"}, "group"),
    ({"metadata": {"a": "x" * MAX_METADATA}}, "16384 bytes"),
    ({"metadata": {"a": [{"b": math.nan}]}}, "NaN"),
    ({"metadata": {"a": -math.inf}}, "NaN"),
    ({"metadata": {"a": reduce(lambda inner, _: [inner], range(2000), 1)}}, "recursion"),
    ({"tags": tuple(map(str, range(33)))}, "tags"),
    ({"tags": ("x" * 101,)}, "a tag"),
    ({"tags": ("",)}, "a tag"),
    ({"tags": (" x",)}, "a tag"),
]


@pytest.mark.parametrize(("members", "why"), LABELS)
@pytest.mark.parametrize("kind", [Labels, LabelChanges])
def test_labels_beyond_their_bounds(kind, members, why):
    with pytest.raises(ValueError, match=why):
        kind(**members)


@pytest.mark.parametrize("kind", [Labels, LabelChanges])
def test_labels_of_a_request(kind):
    whole = kind("x" * 200, {"a": "x" * (MAX_METADATA - 8)}, tuple("x" * 98 + f"{n:02}" for n in range(32)))
    assert msgspec.json.decode(msgspec.json.encode(whole), type=kind) == whole
    for body in (b'{"tags": [" x"]}', b'{"tagz": []}', b'{"group": 1}', b'{"metadata": []}', b'{"metadata": {"a": NaN}}'):
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(body, type=kind)


def test_changes_replace_whole_members():
    labels = Labels("g", {"a": 1}, ("x",))
    assert labels.changed(LabelChanges()) == labels
    assert labels.changed(LabelChanges(metadata={"b": 2})) == Labels("g", {"b": 2}, ("x",))
    assert labels.changed(LabelChanges("", {}, ())) == Labels()
    assert Labels("h").changed(Labels("", {"c": 3}).changes) == Labels("h", {"c": 3})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1.1e300])
@pytest.mark.parametrize("member", ["reward", "components", "turns", "sequences"])
def test_rewards_are_finite(member, number):
    value = number if member == "reward" else {"x": number}
    with pytest.raises(ValueError, match="finite"):
        Reward(**{member: value})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({member: value}, Reward)


def test_rewards_of_a_request():
    whole = Reward(-1e300, {str(n): 0.5 for n in range(100)}, {"t": 1.0}, {"s": 2.0})
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Reward) == whole
    for body in (b'{"reward": "1"}', b'{"reward": true}', b'{"reward": 1e301}', b'{"components": {"a": null}}', b'{"reward": NaN}'):
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(body, type=Reward)
    with pytest.raises(ValueError, match="components"):
        Reward(components={str(n): 0.5 for n in range(101)})


@pytest.mark.parametrize(
    ("limits", "silent", "busy", "up", "left"),
    [
        ({}, 1e9, False, "", None),
        ({"deadline": 110.0}, 0.0, False, "", 10.0),
        ({"deadline": 100.0}, 0.0, True, "its deadline passed at 100", 0.0),
        ({"silent_for": 60.0}, 59.0, False, "", 1.0),
        ({"silent_for": 60.0}, 60.0, False, "no call began or ended for 60 seconds", 0.0),
        ({"silent_for": 60.0}, 99.0, True, "", -39.0),
        ({"deadline": 130.0, "silent_for": 60.0}, 50.0, False, "", 10.0),
    ],
)
def test_the_time_of_a_session(limits, silent, busy, up, left):
    settings = SessionSettings(**limits)
    found = settings.time_up(100.0, silent=silent, busy=busy)
    assert (found.removesuffix(" (Unix time)"), settings.seconds_left(100.0, silent=silent)) == (up, left)
