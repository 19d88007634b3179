"""Routed experts: which rows belong to which tokens, and how files and pieces are joined."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.core.experts import UNPLACED, ExpertPart, ExpertRows, covered, file_parts, joined, placed, read_npy
from tokencache.core.turn import Turn

SHAPE = (3, 2)
ROW = 6


def rows(numbers):
    """One row for each number, which fills it."""
    return ExpertRows("|u1", SHAPE, bytes(number for number in numbers for _ in range(ROW)))


def turn(name, *, prompt, completion, path="", start=0, base=None, shared=0):
    return Turn(
        id=name, call=name, match="root", prompt_tokens=prompt, completion_tokens=completion, experts=path, experts_start=start, base=base,
        shared=shared,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["|u1", "<u2", "<i4"])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_files_are_read_and_written_as_numpy_does(kind, count):
    array = np.arange(count * 6).reshape(count, 3, 2).astype(kind)
    file = io.BytesIO()
    np.save(file, array)
    found = read_npy(file.getvalue())
    assert (len(found), found.kind, found.shape, found.data) == (count, kind, SHAPE, array.tobytes())
    again = np.load(io.BytesIO(found.as_npy()))
    assert again.dtype == array.dtype
    assert again.tolist() == array.tolist()
    assert found.between(2, 5).data == array[2:5].tobytes()


def npy(value, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, value, **options)
    return file.getvalue()


def test_newer_versions_of_the_format_are_read():
    assert len(read_npy(npy(np.zeros((4, 1, 1), "u1"), version=(3, 0)))) == 4


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x93NUMPY\x01\x00\x04\x00oops",
        b"\x93NUMPY\x01\x00\x03\x00[1]",
        npy(np.zeros((4, 2, 2), "f4")),
        npy(np.asfortranarray(np.zeros((4, 2, 2), "u1"))),
        npy(np.zeros(4, "u1")),
        npy(np.zeros((4, 0, 2), "u1")),
        npy(np.zeros((4, 2, 2), "u1"))[:-1],
    ],
    ids=["empty", "header", "no-dict", "floats", "columns", "no-rows", "no-layers", "cut"],
)
def test_other_files_are_refused(file):
    with pytest.raises(ValueError, match=r"\w"):
        read_npy(file)


@pytest.mark.parametrize(
    ("count", "asked", "start"),
    [(99, 0, 0), (99, 40, 0), (59, 40, 40), (100, 0, UNPLACED), (59, 0, UNPLACED), (60, 40, UNPLACED), (0, 99, 99)],
)
def test_the_number_of_rows_says_where_they_begin(count, asked, start):
    assert placed(count, 100, asked) == start


def test_parts_follow_the_bases_of_a_turn():
    turns = {
        one.id: one
        for one in (
            turn("a", prompt=10, completion=5, path="a.npy"),
            turn("b", prompt=20, completion=5, path="b.npy", start=14, base="a", shared=15),
            turn("cut", prompt=18, completion=4, path="cut.npy", start=12, base="a", shared=12),  # without the end of a's reply
            turn("stream", prompt=30, completion=5, start=24, base="b", shared=25),
            turn("after", prompt=40, completion=2, path="after.npy", start=24, base="stream", shared=35),
            turn("odd", prompt=30, completion=5, path="odd.npy", start=UNPLACED, base="b", shared=25),
            turn("json", prompt=9, completion=2, path="json.json", base=None),
        )
    }
    a, b = ExpertPart("a.npy", 0, 14), ExpertPart("b.npy", 14, 24)
    assert file_parts(turns["a"], turns) == [a]
    assert file_parts(turns["b"], turns) == [a, b]
    assert file_parts(turns["cut"], turns) == [ExpertPart("a.npy", 0, 12), ExpertPart("cut.npy", 12, 21)]
    assert file_parts(turns["stream"], turns) == [a, b]
    assert file_parts(turns["after"], turns) == [a, b, ExpertPart("after.npy", 24, 41)]
    assert file_parts(turns["odd"], turns) == [a, b]
    assert file_parts(turns["json"], turns) == []
    assert [covered(turns[name]) for name in ("a", "b", "stream", "odd", "json")] == [14, 24, 24, 0, 0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6))
def test_pieces_of_a_reply_are_joined_with_the_earlier_rows(pieces):
    """Each piece has `new` rows, and repeats the last `again` rows of those before it, which another version may have computed."""
    given_pieces, expected = [], []
    for number, (new, wanted) in enumerate(pieces):
        again = min(wanted, len(expected))
        given_pieces.append((len(expected) - again, rows([200] * again + [number] * new)))
        expected += [number] * new
    assert joined(given_pieces) == rows(expected)


def test_a_hole_and_another_model_are_refused():
    with pytest.raises(ValueError, match="tokens from 2 to 3 have no"):
        joined([(0, rows([1, 2])), (3, rows([3]))])
    with pytest.raises(ValueError, match="follow"):
        joined([(0, rows([1, 2])), (2, ExpertRows("<u2", SHAPE, bytes(12)))])
    with pytest.raises(ValueError, match="no routed experts"):
        joined([])
