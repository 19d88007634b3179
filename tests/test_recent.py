import pytest

from tokencache.recent import Expiring, Recent, RecentBySize


def test_the_entry_that_was_set_first_goes_first():
    kept = Recent(2)
    kept["a"], kept["b"], kept["a"], kept["c"] = 1, 2, 3, 4
    assert dict(kept) == {"a": 3, "c": 4}


def test_an_entry_that_is_moved_to_the_end_stays():
    kept = RecentBySize(2, len)
    kept["a"], kept["b"] = "x", "y"
    kept.move_to_end("a")
    kept["c"] = "z"
    assert dict(kept) == {"a": "x", "c": "z"}


def test_sizes_count_together():
    kept = RecentBySize(5, len)
    kept["a"], kept["b"] = "xx", "yyy"
    kept["a"] = "x"
    assert dict(kept) == {"b": "yyy", "a": "x"}
    kept["c"] = "zzzz"
    assert (dict(kept), kept.total) == ({"a": "x", "c": "zzzz"}, 5)


def test_a_value_that_is_too_large_is_not_kept_and_replaces_what_was_there():
    kept = RecentBySize(5, len)
    kept["a"], kept["b"] = "x", "yy"
    kept["a"] = "larger"
    assert (dict(kept), kept.total) == ({"b": "yy"}, 2)


def test_an_entry_that_grows_later_counts_as_it_was():
    kept, value = RecentBySize(5, len), ["x"]
    kept["a"], kept["b"] = value, ["y"]
    value += "xx"
    kept.pop("a")
    assert kept.total == 1


def test_removed_entries_count_no_more():
    kept = RecentBySize(5, len)
    kept["a"], kept["b"] = "x", "yy"
    assert (kept.pop("a"), kept.pop("a", "none"), kept.total) == ("x", "none", 2)
    kept.clear()
    assert (dict(kept), kept.total) == ({}, 0)


def test_entries_expire_and_setting_one_again_begins_its_time_again():
    now = 0.0
    kept = Expiring(10.0, lambda: now)
    kept["a"], kept["b"] = 1, 2
    now = 5.0
    kept["a"] = 3
    now = 10.0
    assert (dict(kept), kept.get("a"), kept.get("b"), len(kept)) == ({"a": 3}, 3, None, 1)
    with pytest.raises(KeyError):
        kept["b"]
    assert kept.pop("b", "none") == "none"
    now = 15.0
    assert (kept.get("a"), list(kept), "a" in kept) == (None, [], False)


def test_expired_entries_and_those_above_the_limit_take_no_memory():
    now = 0.0
    kept = Expiring(10.0, lambda: now, most=2)
    kept["a"], kept["b"], kept["c"] = 1, 2, 3
    assert dict(kept) == {"b": 2, "c": 3}
    now = 10.0
    kept["d"] = 4
    assert len(kept._entries) == 1
