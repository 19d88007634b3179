"""A native export with text becomes every other format, the same bytes that the proxy writes."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.forest import grow
from tests.core.settings import SOME
from tests.trajectories.rollouts import ROLLOUTS, linear, thrown_away
from tokencache.core import ids
from tokencache.core.lineage import lineages
from tokencache.core.session import Reward
from tokencache.core.turn import hash_logprobs
from tokencache.core.weights import Announced
from tokencache.store.base import SessionInfo
from tokencache.trajectories.formats.reading import read_native
from tokencache.trajectories.formats.registry import FORMATS, export, write
from tokencache.trajectories.lengths import POLICIES, Lengths
from tokencache.trajectories.limiting import limit
from tokencache.trajectories.rollout import Records, rollout
from tokencache.trajectories.verify_rows import verify_row
from tokencache.trajectories.versions import LagLimit


def exported(made, **options):
    """A native export, as it is read from a file."""
    return msgspec.json.decode(write(made, FORMATS["native"], **options))


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_converted_export_equals_the_proxys(name, wanted):
    made = ROLLOUTS[name]
    assert write(read_native(exported(made, text=True)), FORMATS[wanted]) == write(made, FORMATS[wanted])


@pytest.mark.parametrize("wanted", ["slime", "skyrl", "nemo-gym"])
@pytest.mark.parametrize("stopped", [False, True])
def test_how_a_reply_ended_is_known_after_a_conversion(wanted, stopped):
    """A reason that does not say it is decided by the last id, which only the proxy can judge."""
    talk = linear()
    talk.change(talk.turns[-1].id, finish_reason="repetition", stopped=stopped)
    made = rollout(talk.records())
    assert write(read_native(exported(made, text=True)), FORMATS[wanted]) == write(made, FORMATS[wanted])


def test_the_order_of_named_versions_is_known_after_a_conversion_that_leaves_out_a_sequence():
    talk = thrown_away()
    for turn, version in zip(talk.turns, ("old", "mid", "new", "mid"), strict=True):
        marks = ("sampled-placeholder",) if turn.id == "t1" else ()
        span = {"version": version, "start": 0, "end": turn.completion_tokens}
        talk.change(turn.id, versions=[span], version_source="trainer", marks=marks)
    announced = tuple(Announced(name, n, float(n)) for n, name in enumerate(("old", "mid", "new")))
    made = rollout(msgspec.structs.replace(talk.records(), announced=announced))
    written = write(read_native(exported(made, text=True)), FORMATS["verl"])
    assert written == write(made, FORMATS["verl"])
    figures = msgspec.json.decode(written)["figures"]
    assert (figures["placeholders"]["dropped"], figures["oldest_version"], figures["newest_version"]) == (1, "old", "new")


@pytest.mark.parametrize("name", ROLLOUTS)
def test_an_export_with_text_is_read_and_written_without_a_loss(name):
    with_text = exported(ROLLOUTS[name], text=True)
    assert exported(read_native(with_text), text=True) == with_text


@pytest.mark.parametrize("name", ROLLOUTS)
def test_text_adds_the_requests_and_changes_nothing_else(name):
    plain, with_text = exported(ROLLOUTS[name]), exported(ROLLOUTS[name], text=True)
    for sequence in with_text["sequences"]:
        for turn in sequence["turns"]:
            del turn["request"]
    assert {**with_text, "digest": ""} == {**plain, "digest": ""}


def test_each_message_is_written_once():
    with_text = write(ROLLOUTS["linear"], FORMATS["native"], text=True)
    assert with_text.count(b'"role":"system"') == 1


@pytest.mark.parametrize("most", range(50, 400, 35))
def test_a_turn_whose_base_was_left_out_has_its_whole_request(most):
    made = limit(ROLLOUTS["respliced"], Lengths("drop", max_length=most))
    read = read_native(exported(made, text=True))
    assert {turn: context.messages for turn, context in read.contexts.items()} == {
        span.turn.id: made.contexts[span.turn.id].messages for sequence in made.sequences for span in sequence.turns
    }


def test_a_message_that_is_no_json_is_left_out_and_the_others_stay():
    made = ROLLOUTS["linear"]
    contexts = {
        turn: msgspec.structs.replace(context, messages=[msgspec.Raw(b'"\\ud800"'), *context.messages[1:]])
        for turn, context in made.contexts.items()
    }
    broken = msgspec.structs.replace(made, contexts=contexts)
    with_text = exported(broken, text=True)
    assert with_text["sequences"][0]["turns"][0]["request"]["messages"][0] is None
    assert write(read_native(with_text), FORMATS["slime"]) == write(broken, FORMATS["slime"])


def test_what_is_no_export():
    with pytest.raises(ValueError, match="session"):
        read_native({"rows": []})
    torn = exported(ROLLOUTS["linear"], text=True)
    torn["sequences"][0]["turns"][1]["request"]["base"] = "nope"
    with pytest.raises(ValueError, match="begins with that of turn nope, which is missing"):
        read_native(torn)


ANNOUNCED = tuple(Announced(version, n, float(n)) for n, version in enumerate("123", 1))


def recorded(rng):
    """A random session of two models, one of which is not trained, with forced ids, policy versions and rewards of sequences."""
    forest, models = grow(rng), {}
    for turn in forest.turns:
        model = models[turn.id] = models[turn.parent] if turn.parent else rng.choice("aab")
        end, marks = turn.completion_tokens, (*turn.marks, *(("not-trainable",) if model == "b" else ()))
        middle = rng.randint(0, end)
        parts = [(start, stop) for start, stop in ((0, middle), (middle, end)) if start < stop]
        versions = [{"version": rng.choice("123"), "start": start, "end": stop} for start, stop in parts]
        values = ids.unpack_logprobs(forest.tokens[turn.id].logprobs)
        forced = ((0, middle),) if middle and values and rng.random() < 0.7 else ()
        packed = ids.pack_logprobs([0.0] * middle + values[middle:]) if forced else forest.tokens[turn.id].logprobs
        members = {"model": model, "marks": marks, "versions": versions, "version_source": "trainer"}
        forest.change(turn.id, forced=forced, logprobs=packed, logprobs_hash=hash_logprobs(packed), **members)
    sequences = {line[0].id: rng.choice([0.0, 1.0]) for line in lineages(forest.turns) if rng.random() < 0.5}
    reward = Reward(rng.choice([None, 0.5]), sequences=sequences, recorded=len(forest.turns))
    info = SessionInfo("s", 1.0, 2.0, True, len(forest.turns), (), (), reward=reward)
    return Records(info, forest.turns, forest.tokens, {}, announced=ANNOUNCED)


@SOME
@given(rng=st.randoms(use_true_random=False))
def test_any_export_with_limits_is_sound_and_becomes_every_format(rng):
    records = recorded(rng)
    assume(all(turn.prompt_tokens > 1 for turn in records.turns))
    lengths = Lengths(rng.choice(POLICIES), max_length=rng.randint(1, 20)) if rng.random() < 0.7 else None
    limits = {"lag": rng.choice([None, LagLimit(1, "3", ANNOUNCED)]), "model": rng.choice(["", "a"])}
    native = msgspec.json.decode(export(records, FORMATS["native"], lengths, **limits))
    for name, wanted in FORMATS.items():
        written = export(records, wanted, lengths, **limits)
        assert write(read_native(native), wanted) == written, name
        whole = msgspec.json.decode(written)
        rows = whole[wanted.rows] if wanted.rows and name != "native" else [whole]
        assert [failure for row in rows for failure in verify_row(row).failures] == []
