"""The prefix forest: rows come out exactly, each sampled token has one owner, and a shared prefix occurs once."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.made import as_trajectory, random_rows, row, rows_of, shape
from tests.core.forest import grow
from tests.core.settings import SOME
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.batching.forest import FlatRow, Segment, build_forest
from tokencache.batching.forest_check import check_forest, verify_forest
from tokencache.core.media import PlacedMedia


def flat(rows):
    return [
        FlatRow(
            one.trajectory.session,
            one.sequence.id,
            one.sequence.token_ids,
            one.sequence.loss_mask,
            one.sequence.logprobs,
            one.sequence.media,
        )
        for one in rows
    ]


@SOME
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_forest_of_random_sessions_is_whole(seed, sessions):
    rows = random_rows(seed, sessions)
    assert check_forest(build_forest(rows), flat(rows)) == []


@st.composite
def tiny_rows(draw):
    """Rows of two token values, so that nearly all of them share prefixes, and many sample the same tokens."""
    rows = []
    for n in range(draw(st.integers(0, 6))):
        tokens = draw(st.lists(st.integers(0, 1), max_size=7))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
        logprobs = [-draw(st.integers(1, 9)) / 8 if one else 0.0 for one in mask]
        rows.append(row(tokens, mask, sequence=f"q{n}", logprobs=logprobs))
    return rows


@SOME
@given(tiny_rows())
def test_a_forest_of_any_rows_is_whole(rows):
    forest = build_forest(rows)
    assert check_forest(forest, flat(rows)) == []
    assert forest.rows() == flat(rows)


@SOME
@given(tiny_rows())
def test_a_token_attends_to_exactly_the_tokens_before_it_in_a_row(rows):
    forest = build_forest(rows)
    before = set()
    for n in range(len(rows)):
        path = [i for start, end in forest.ranges(n) for i in range(start, end)]
        assert [forest.positions[i] for i in path] == list(range(len(path)))
        before |= {(q, k) for at, q in enumerate(path) for k in path[: at + 1]}
    size = range(len(forest.token_ids))
    assert before == {(q, k) for q, k in itertools.product(size, size) if k <= q < forest.ends[k]}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_of_every_shape_passes_the_check(name):
    assert verify_forest(shape(name)) == []


def test_a_retry_repeats_no_token_of_its_context():
    rows = rows_of(shape("thrown-away"))
    context = rows[0].sequence.turns[1].completion[0]  # both answers follow the same prompt
    assert len(build_forest(rows).token_ids) == sum(len(one.sequence.token_ids) for one in rows) - context


def test_sessions_of_a_group_share_their_prompt():
    rows = [row([5, 6, 7, answer], [0, 0, 0, 1], session=f"s{answer}") for answer in range(4)]
    forest = build_forest(rows)
    assert forest.token_ids == [5, 6, 7, 0, 1, 2, 3]
    assert forest.parents == [-1, 0, 1, 2, 2, 2, 2]
    assert forest.positions == [0, 1, 2, 3, 3, 3, 3]
    assert forest.loss_mask == [0, 0, 0, 1, 1, 1, 1]
    assert forest.segments == [Segment(0, 3, -1), *(Segment(n, n + 1, 0) for n in range(3, 7))]


def test_a_token_that_two_rows_sampled_has_two_places():
    """Each sample has its own log probability, and both are trained."""
    rows = [row([5, 1, 2], [0, 1, 1], sequence="a", logprobs=[0.0, -0.1, -0.2]), row([5, 1, 3], [0, 1, 1], sequence="b")]
    forest = build_forest(rows)
    assert forest.token_ids == [5, 1, 2, 1, 3]
    assert forest.owners == [-1, 0, 0, 1, 1]
    assert forest.rows() == flat(rows)


def test_context_that_another_row_sampled_is_shared_whichever_comes_first():
    sampled, context = row([5, 1, 2], [0, 1, 1], sequence="a"), row([5, 1, 2, 9], sequence="b")
    for rows in ([sampled, context], [context, sampled]):
        forest = build_forest(rows)
        assert forest.token_ids == [5, 1, 2, 9]
        assert forest.loss_mask == [0, 1, 1, 0]
        assert forest.rows() == flat(rows)


def test_context_follows_the_longest_of_several_equal_beginnings():
    first = row([5, 1, 2], [0, 1, 1], sequence="a")
    second = row([5, 1, 3], [0, 1, 1], sequence="b")
    assert len(build_forest([first, second, row([5, 1, 3, 9], sequence="c")]).token_ids) == 6


def with_images(one, *media):
    """A row with these images; its images are not known if there are none."""
    turn = msgspec.structs.replace(one.sequence.turns[0], marks=["media"])
    return one._replace(sequence=msgspec.structs.replace(one.sequence, turns=[turn], media=list(media)))


def image(start, length=1, sha256="a" * 64):
    return PlacedMedia("image", sha256, "image/png", start, length)


@pytest.mark.parametrize("place", range(3))
def test_rows_whose_images_are_not_known_share_no_tokens(place):
    """Equal ids may stand for different images."""
    rows = [row([5, 6, 7], sequence="a"), row([5, 6, 7, 8], sequence="c")]
    rows.insert(place, with_images(row([5, 6, 7], sequence="b")))
    forest = build_forest(rows)
    assert len(forest.token_ids) == 7
    assert check_forest(forest, flat(rows)) == []


def test_rows_share_their_beginnings_as_far_as_the_images_are_the_same():
    tokens = [5, 9, 9, 6, 9, 9, 7]
    rows = [
        with_images(row(tokens, sequence="a"), image(1, 2), image(4, 2)),
        with_images(row([*tokens, 8], sequence="same"), image(1, 2), image(4, 2)),
        with_images(row(tokens, sequence="other second"), image(1, 2), image(4, 2, "b" * 64)),
        with_images(row(tokens, sequence="two images"), image(1, 1), image(2, 1), image(4, 2)),
        row(tokens, sequence="text"),
    ]
    forest = build_forest(rows)
    assert check_forest(forest, flat(rows)) == []
    assert len(forest.token_ids) == 8 + 3 + 6 + 6
    assert len(forest.media) == 2 + 1 + 3


@st.composite
def rows_with_images(draw):
    """Rows of one token value and two images, so that nearly all of them have equal ids."""
    rows = []
    for n in range(draw(st.integers(0, 6))):
        tokens, media, mask = [], [], []
        for part in draw(st.lists(st.sampled_from(["text", "sampled", "a" * 64, "b" * 64, ""]), max_size=5)):
            length = 1 if part in {"text", "sampled"} else draw(st.integers(1, 2))
            if part not in {"text", "sampled"}:
                media.append(image(len(tokens), length, part))
            tokens += [0] * length
            mask += [int(part == "sampled")] * length
        rows.append(with_images(row(tokens, mask, sequence=f"q{n}"), *media))
    return rows


@SOME
@given(rows_with_images())
def test_a_forest_of_rows_with_images_is_whole(rows):
    forest = build_forest(rows)
    assert check_forest(forest, flat(rows)) == []
    assert forest.rows() == flat(rows)


def test_the_check_finds_a_beginning_that_is_shared_with_another_image():
    rows = [with_images(row([5, 9], sequence=name), image(1, sha256=name * 64)) for name in "ab"]
    forest = build_forest([rows[0], rows[0]._replace(sequence=msgspec.structs.replace(rows[0].sequence, id="b"))])
    assert check_forest(forest, flat(rows)) == ["row s/b: media differ"]


@pytest.mark.parametrize(
    ("media", "words"),
    [([image(0, 2), image(1)], "overlap"), ([image(2, 2)], "beyond"), ([image(1)], "was sampled")],
)
def test_images_that_do_not_fit_the_tokens_are_refused(media, words):
    with pytest.raises(ValueError, match=words):
        build_forest([with_images(row([1, 2, 3], [0, 1, 0]), *media)])


def test_a_row_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match="session s, sequence q occurs twice"):
        build_forest([row([1, 2])] * 2)


@pytest.mark.parametrize(
    ("mask", "logprobs", "words"),
    [
        ([0], [0.0, 0.0], "2 tokens, 1 mask entries"),
        ([0, 2], [0.0, 0.0], "entries other than 0 and 1"),
        ([0, 0], [0.0, -1.0], "a token with mask 0 has a log probability"),
    ],
)
def test_a_row_that_does_not_fit_together_is_refused_and_reported(mask, logprobs, words):
    wrong = row([1, 2], mask, logprobs=logprobs)
    with pytest.raises(ValueError, match=words):
        build_forest([wrong])
    (failure,) = verify_forest(msgspec.structs.replace(wrong.trajectory, sequences=[wrong.sequence]))
    assert words in str(failure)


@pytest.mark.whole
def test_a_deep_forest_is_no_problem():
    """More forks than Python's recursion limit, one below the other."""
    rows = [row([0] * n + [1], sequence=f"q{n}") for n in range(1, 1200)]
    forest = build_forest(rows)
    assert len(forest.token_ids) == 1199 + 1199
    assert forest.rows()[-1].token_ids == rows[-1].sequence.token_ids


def spoiled(forest, rng):
    """A forest with one entry changed."""
    name = rng.choice(["token_ids", "parents", "positions", "ends", "owners", "logprobs"])
    values = list(getattr(forest, name))
    values[rng.randrange(len(values))] += rng.choice([-1, 1])
    return name, msgspec.structs.replace(forest, **{name: values})


@SOME
@given(st.integers(0, 2**32))
def test_the_check_finds_any_changed_entry(seed):
    rng = random.Random(seed)
    rows = [one for one in random_rows(seed) if one.sequence.token_ids]
    if rows:
        name, wrong = spoiled(build_forest(rows), rng)
        assert check_forest(wrong, flat(rows)), name


def test_the_check_finds_a_prefix_that_occurs_twice():
    rows = [row([5, 6], sequence="a"), row([5, 7], sequence="b")]
    apart = build_forest([rows[0]])
    twice = msgspec.structs.replace(
        apart,
        token_ids=[5, 6, 5, 7],
        parents=[-1, 0, -1, 2],
        positions=[0, 1, 0, 1],
        ends=[2, 2, 4, 4],
        owners=[-1] * 4,
        logprobs=[0.0] * 4,
        segments=[Segment(0, 2, -1), Segment(2, 4, -1)],
        leaves=[apart.leaves[0], msgspec.structs.replace(apart.leaves[0], sequence="b", segment=1)],
    )
    assert check_forest(twice, flat(rows)) == ["token 2: occurs twice after the same prefix"]


def test_the_check_finds_tokens_out_of_depth_first_order():
    """Two trees of two tokens each, interleaved: by `ends` a token would attend to the other tree."""
    rows = [row([5, 6], sequence="a"), row([7, 8], sequence="b")]
    forest = build_forest(rows)
    interleaved = {"token_ids": [5, 7, 6, 8], "parents": [-1, -1, 0, 1], "positions": [0, 0, 1, 1], "ends": [3, 4, 3, 4]}
    segments = [Segment(0, 1, -1), Segment(1, 2, -1), Segment(2, 3, 0), Segment(3, 4, 1)]
    leaves = [msgspec.structs.replace(leaf, segment=n + 2) for n, leaf in enumerate(forest.leaves)]
    wrong = msgspec.structs.replace(forest, **interleaved, segments=segments, leaves=leaves)
    assert wrong.rows() == flat(rows)
    assert check_forest(wrong, flat(rows)) == [f"token {n}: its descendants do not follow it without a gap" for n in (0, 1)]


def test_the_check_finds_rows_and_segments_that_are_missing():
    rows = [row([5, 6], sequence="a"), row([5, 7], sequence="b")]
    forest = build_forest(rows)
    assert check_forest(forest, flat(rows[:1]))
    for change in (
        {"leaves": forest.leaves[:1]},
        {"leaves": [forest.leaves[0], msgspec.structs.replace(forest.leaves[1], segment=9)]},
        {"segments": forest.segments[:-1]},
        {"segments": [forest.segments[0], Segment(1, 3, 0)]},
        {"segments": [forest.segments[0], forest.segments[1], Segment(2, 3, 2)]},
        {"positions": forest.positions[:-1]},
    ):
        assert check_forest(msgspec.structs.replace(forest, **change), flat(rows))


def test_the_tokens_of_a_forest_are_at_most_those_of_its_rows():
    for seed in range(50):
        rows = rows_of(as_trajectory(of_forest(grow(random.Random(seed)))))
        assert len(build_forest(rows).token_ids) <= sum(len(one.sequence.token_ids) for one in rows)
