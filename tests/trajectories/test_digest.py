"""The digest finds every change of an export, and no other."""

import json
import random

import msgspec
import pytest

from tests.trajectories.rollouts import ROLLOUTS
from tokencache.trajectories.digest import digest_of, recorded_digest
from tokencache.trajectories.formats.registry import FORMATS, write
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify
from tokencache.trajectories.verify_rows import verify_row

CHANGES = 6_000
FULL = ["linear", "respliced", "sub-agent", "aborted", "choices"]


def lines(name, form):
    """The lines of a file: decoded rows of a format."""
    written = msgspec.json.decode(write(ROLLOUTS[name], FORMATS[form], text=form == "native"))
    return [written] if form == "native" or not FORMATS[form].rows else written[FORMATS[form].rows]


def places(value, path=()):
    """Every place in a JSON value: a list of paths."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for name, member in members for place in places(member, (*path, name))]


def other(value, rng):
    """Another value than this one."""
    if isinstance(value, bool) or value is None:
        return {True: False, False: True, None: 0}[value]
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice([value[:at] + "x" + value[at:], value[:at] + value[at + 1 :] if at < len(value) else value + " "])
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 7])
    if isinstance(value, float):
        return value + rng.choice([-0.5, 1e-3, 2.0])
    if isinstance(value, list):
        return rng.choice([[*value, None], value[:-1] if value else [0], value[::-1] if value != value[::-1] else [*value, 1]])
    return {**value, "more": 1} if not value or rng.random() < 0.5 else dict(list(value.items())[1:])


def change(value, path, rng):
    """Change the value at a place; returns a function that restores it."""
    *outer, last = path
    inside = value
    for name in outer:
        inside = inside[name]
    before = inside[last]
    inside[last] = other(before, rng)

    def restore():
        inside[last] = before

    return restore


def test_each_of_many_random_changes_of_a_native_export_changes_the_digest():
    rng = random.Random(16)
    exports = [(export, places(export)) for export in (lines(name, "native")[0] for name in FULL)]
    for n in range(CHANGES):
        export, where = exports[n % len(exports)]
        place = rng.choice(where)
        restore = change(export, place, rng)
        assert digest_of(export) != recorded_digest(export), place
        restore()


def test_the_other_checks_do_not_find_all_of_them():
    (export,) = lines("linear", "native")
    export["sequences"][0]["turns"][1]["served"]["reasoning"] = "Something else."
    assert verify(msgspec.convert(export, Trajectory)) == []
    assert [one.check for one in verify_row(export).failures] == ["digest"]


@pytest.mark.parametrize("form", FORMATS)
def test_each_change_of_a_row_is_found(form):
    rng = random.Random(form)
    for row in (row for name in FULL for row in lines(name, form)):
        assert verify_row(row).failures == []
        assert verify_row(row).has_digest
        where = places(row)
        for place in rng.choices(where, k=20):
            restore = change(row, place, rng)
            assert verify_row(row).failures, place
            restore()


@pytest.mark.parametrize("form", ["verl", "slime", "miles", "trl", "skyrl", "tinker"])
def test_the_tokens_of_a_row_are_checked_by_their_hashes(form):
    """Whoever changes a file with a program may write a new digest. The hashes of the turns are those of the proxy."""
    (row,) = lines("linear", form)
    assert verify_row(row).turns == 3
    changed_row = json.loads(json.dumps(row).replace(f", {ROLLOUTS['linear'].sequences[0].token_ids[80]},", ", 7,"))
    assert {one.check for one in verify_row(changed_row).failures} == {"hashes", "digest"}


def test_the_digest_survives_what_other_tools_do_to_json():
    (export,) = lines("linear", "native")
    shuffled = dict(reversed(export.items()))
    as_javascript = json.loads(json.dumps(export).replace(".0,", ",").replace(".0]", "]").replace(".0}", "}"))
    assert as_javascript["sequences"][0]["logprobs"][0] == 0
    for one in (shuffled, as_javascript, json.loads(json.dumps(export, indent=2, ensure_ascii=False))):
        assert digest_of(one) == recorded_digest(export)


@pytest.mark.parametrize("value", [None, [], 3, "x", {}, {"rows": []}, {"sequences": 3}, {"response_ids": []}, {"steps": [], "extra": 3}])
def test_what_is_no_row_is_a_failure_and_no_exception(value):
    (failure,) = verify_row(value).failures
    assert failure.check == "readable"
