"""A native export with text becomes every other format, the same bytes that the proxy writes."""

import msgspec
import pytest

from tests.trajectories.rollouts import ROLLOUTS, linear, thrown_away
from tokencache.core.weights import Announced
from tokencache.trajectories.formats.reading import read_native
from tokencache.trajectories.formats.registry import FORMATS, write
from tokencache.trajectories.lengths import Lengths
from tokencache.trajectories.limiting import limit
from tokencache.trajectories.rollout import rollout


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
