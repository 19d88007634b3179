"""Images in trajectories: what `verify` checks, what formats write, and which rows no format has."""

import msgspec
import pytest
import tinker as sdk

from tests.media import RED, described
from tests.trajectories.images import RED_AT, of_talk, placed, sampled_placeholder, seeing
from tests.trajectories.rollouts import ROLLOUTS
from tokencache.batching import no_placeholders, select
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.formats.reading import read_native
from tokencache.trajectories.formats.registry import FORMATS, write
from tokencache.trajectories.formats.tinker import tinker
from tokencache.trajectories.lengths import Lengths
from tokencache.trajectories.limiting import limit, without_placeholders
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify
from tokencache.trajectories.verify_rows import verify_row


def exported(talk):
    return msgspec.json.decode(write(of_talk(talk), FORMATS["native"]))


def failures(value):
    return [one for one in verify(msgspec.convert(value, Trajectory)) if one.check == "media"]


def test_a_rollout_with_images_passes():
    value = exported(seeing())
    assert verify(msgspec.convert(value, Trajectory)) == []
    main, branch = value["sequences"]
    assert [(one["start"], one["length"]) for one in main["media"]] == [RED_AT, (main["turns"][1]["prompt"][0] + 3, 6)]
    assert [one["sha256"] for one in branch["media"]] == [described(RED).sha256]


BROKEN = {
    "beyond the ids": (lambda s: s["media"][1].update(length=10**6), "must be after token 9 and before"),
    "empty": (lambda s: s["media"][0].update(length=0), "medium 1 has the tokens 5 to 5"),
    "out of order": (lambda s: s["media"].reverse(), "medium 2 has the tokens"),
    "overlapping": (lambda s: s["media"][1].update(start=6), "medium 2 has the tokens 6 to 12, but must be after token 9"),
    "on sampled tokens": (lambda s: s["media"][0].update(start=s["turns"][0]["completion"][0] - 1), "has tokens that were sampled"),
    "no digest": (lambda s: s["media"][0].update(sha256="F" * 64), "is not a SHA-256"),
    "another image than its branch": (lambda s: s["media"][0].update(sha256="0" * 64), "has other media than the prefix of its parent"),
    "an image less than its branch": (lambda s: s["media"].pop(0), "has other media than the prefix of its parent"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_can_fail(name):
    change, words = BROKEN[name]
    value = exported(seeing())
    change(value["sequences"][0])
    assert any(words in one.words for one in failures(value)), failures(value)


def test_a_medium_without_a_digest_is_permitted():
    """A URL that was not fetched."""
    value = exported(seeing())
    for sequence in value["sequences"]:
        sequence["media"][0]["sha256"] = ""
    assert failures(value) == []


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "native"])
def test_rows_with_sampled_placeholders_are_in_no_format_of_a_trainer(name):
    """Neither the row that sampled one, nor the row that repeats its reply; and the export says so."""
    talk = sampled_placeholder()
    whole = of_talk(talk)
    assert [len(sequence.turns) for sequence in whole.sequences] == [3, 1, 1]
    text = write(whole, FORMATS[name])
    kept = without_placeholders(whole)
    assert [sequence.id for sequence in kept.sequences] == [whole.sequences[1].id]
    report = kept.figures.placeholders
    lost = whole.sequences[0].trainable + whole.sequences[2].trainable
    assert (report.dropped, report.trainable_tokens_lost, len(report.turns)) == (2, lost, 4)
    written = msgspec.json.decode(text)
    figures = written["figures"] if "figures" in written else written["info"]["tokencache"]["figures"]
    assert figures["placeholders"]["dropped"] == 2
    row = FORMATS[name].rows
    if row:
        assert len(written[row]) == 1
    assert figures["trainable_tokens"] == whole.sequences[1].trainable


def left_out(policy):
    """The rollout of `sampled_placeholder` without the row that sampled one. The row that repeats its reply has no longer response."""
    whole = of_talk(sampled_placeholder())
    first, _, repeating = whole.sequences
    most = len(repeating.token_ids) - repeating.response_start
    kept = limit(whole, Lengths(policy, max_response_length=most))
    assert first.turns[1].turn.id not in [span.turn.id for sequence in kept.sequences for span in sequence.turns]
    assert repeating.id in [sequence.id for sequence in kept.sequences]
    return kept, repeating.id


@pytest.mark.parametrize("policy", ["drop", "cut"])
def test_a_row_that_repeats_a_placeholder_is_left_out_without_the_row_that_sampled_it(policy):
    kept, repeating = left_out(policy)
    rows = msgspec.json.decode(write(kept, FORMATS["verl"]))["outputs"]
    assert repeating not in [row["extra_fields"]["tokencache"]["id"] for row in rows]
    value = msgspec.json.decode(write(kept, FORMATS["native"], text=True))
    assert verify(msgspec.convert(value, Trajectory)) == []
    assert write(read_native(value), FORMATS["verl"]) == write(kept, FORMATS["verl"])
    chosen = select([msgspec.convert(value, Trajectory)], no_placeholders)
    assert repeating in [dropped.row.sequence.id for dropped in chosen.dropped]


def test_the_native_format_has_all_rows():
    value = exported(sampled_placeholder())
    assert len(value["sequences"]) == 3
    assert value["figures"]["placeholders"] is None
    assert write(read_native(value), FORMATS["verl"]) == write(of_talk(sampled_placeholder()), FORMATS["verl"])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "native"])
def test_no_format_of_a_trainer_trains_images_whose_places_are_not_known(name):
    """The engine did not report which tokens stand for an image, so they would be trained as text. The rows stay, with mask 0."""
    whole = ROLLOUTS["media"]
    seeing, plain = whole.sequences
    written = msgspec.json.decode(write(whole, FORMATS[name]))
    figures = written["figures"] if "figures" in written else written["info"]["tokencache"]["figures"]
    assert figures["placeholders"] == {"dropped": 0, "masked": 1, "trainable_tokens_lost": seeing.trainable, "turns": []}
    assert figures["trainable_tokens"] == plain.trainable
    masked, kept = without_placeholders(whole).sequences
    assert (masked.id, sum(masked.loss_mask), any(masked.logprobs), kept) == (seeing.id, 0, False, plain)
    member = FORMATS[name].rows
    rows = written[member] if member else [written]
    assert [failure.words for row in rows for failure in verify_row(row).failures] == []
    value = msgspec.json.decode(write(whole, FORMATS["native"], text=True))
    assert value["figures"]["placeholders"] is None
    assert write(read_native(value), FORMATS[name]) == write(whole, FORMATS[name])


@pytest.mark.parametrize("shape", [shape for shape in ROLLOUTS if shape != "media"])
def test_a_rollout_without_placeholders_stays_as_it_is(shape):
    assert without_placeholders(ROLLOUTS[shape]) is ROLLOUTS[shape]


def test_tinker_has_each_image_in_the_place_of_its_tokens():
    (main, branch), (long, short) = tinker(of_talk(seeing()))["data"], of_talk(seeing()).sequences
    for row, sequence, count in ((main, long, 2), (branch, short, 1)):
        made = sdk.Datum(sdk.ModelInput(**row["model_input"]), {name: sdk.TensorData(**one) for name, one in row["loss_fn_inputs"].items()})
        assert made.model_input.length == len(sequence.token_ids) - 1 == len(row["loss_fn_inputs"]["target_tokens"]["data"])
        images = [chunk for chunk in made.model_input.chunks if isinstance(chunk, sdk.types.ImageAssetPointerChunk)]
        assert [(one.location, one.length) for one in images] == [(f"{m.sha256}.png", m.length) for m in sequence.media]
        assert len(images) == count
        at = 0
        for chunk in made.model_input.chunks:
            if isinstance(chunk, sdk.EncodedTextChunk):
                assert chunk.tokens == sequence.token_ids[at : at + chunk.length]
            at += chunk.length


@pytest.mark.parametrize("other", [placed(media_type="image/webp"), placed(modality="audio", media_type="audio/wav")])
def test_what_tinker_cannot_read_is_written_as_tokens(other):
    made = of_talk(seeing())
    first = msgspec.structs.replace(made.sequences[0], media=(other,))
    (row, _) = tinker(msgspec.structs.replace(made, sequences=(first, made.sequences[1])))["data"]
    (chunk,) = row["model_input"]["chunks"]
    assert chunk["tokens"] == first.token_ids[:-1]
    assert row["tokencache"]["media"][0]["media_type"] == other.media_type


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_refers_to_the_images(name):
    text = write(of_talk(seeing()), FORMATS[name]).decode()
    assert described(RED).sha256 in text
    assert native(of_talk(seeing()))["sequences"][0]["media"]
