"""Two rows of tokens, laid one above the other: nothing lost, nothing moved."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tokencache.demo.alignment import BAR, align, wrap


def rows(top, bottom):
    columns = align([t.encode() for t in top], [b.encode() for b in bottom])
    return "".join(c.top for c in columns), "".join(c.bottom for c in columns), columns


def test_same_text_in_other_tokens():
    top, bottom, columns = rows(["Let", " m", "e"], ["L", "et", " me"])
    assert (top, bottom) == ("│L et│·m│e│", "│L│et│·m e│")
    assert not any(c.top_same for c in columns[:-1])


def test_same_tokens_are_known_as_such():
    _, _, columns = rows(["a", "bc", "d"], ["a", "b", "c", "d"])
    assert [c.top for c in columns if c.top_same and c.top != BAR] == ["a", "d"]


def test_what_one_row_lacks_faces_blanks():
    assert rows(["x", "think", "y"], ["x", "y"])[:2] == ("│x│think│y│", "│x      │y│")


def test_a_long_lack_is_cut_at_token_borders():
    top, bottom, _ = rows(["a", *["word"] * 20, "b"], ["a", "b"])
    assert top == "│a│word│word│word│ … │word│word│word│b│"
    assert len(top) == len(bottom)


def test_a_split_character_is_spelt_in_bytes():
    columns = align([b"caf\xc3", b"\xa9"], ["café".encode()])
    assert "".join(c.top for c in columns) == r"│caf\xc3│\xa9│"
    assert "".join(c.bottom for c in columns) == "│café        │"
    assert not any(c.top_same for c in columns[:-1])
    assert all(c.top_same and c.bottom_same for c in align([b"\xc3", b"\xa9"], [b"\xc3", b"\xa9"]))


texts = st.lists(st.text(st.sampled_from('ab{" \n☕é日\u0301\x00'), min_size=1, max_size=6), max_size=12)


@given(texts, texts, st.integers(20, 60))
def test_rows_are_of_one_width_and_fit(top, bottom, width):
    _, _, columns = rows(top, bottom)
    for column in columns:
        assert cell_len(column.top) == cell_len(column.bottom) == column.width
    for line in wrap(columns, width):
        assert sum(column.width for column in line) <= width
    assert [c for line in wrap(columns, width) for c in line] == columns
