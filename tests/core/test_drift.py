"""Drift as values: what differs, where, and for which cause; told from ids and texts alone."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import Forest
from tests.core.settings import MANY
from tokencache.core import drift as causes
from tokencache.core import ids
from tokencache.core.drift import Drift, MeasuredTurn, Site, break_points, differences, plain_rendering
from tokencache.core.messages import Message, ToolCall
from tokencache.core.rules import RULES
from tokencache.core.turn import Anchor

few = st.lists(st.integers(0, 3), max_size=24)


def found(prompt, rendering):
    return differences(ids.pack(prompt), ids.pack(rendering))


def fewest_changes(a, b):
    """Levenshtein's distance, by the book."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@given(few, few)
@MANY
def test_the_sites_with_the_prompt_say_the_rendering(prompt, rendering):
    assert plain_rendering(prompt, found(prompt, rendering)) == rendering


@given(few)
@MANY
def test_equal_inputs_have_no_site(prompt):
    assert found(prompt, prompt) == []


@given(few, few)
@MANY
def test_sites_are_apart_in_order_and_as_few_tokens_as_can_be(prompt, rendering):
    sites = found(prompt, rendering)
    assert all(before.end < after.start for before, after in pairwise(sites))
    assert all(0 <= site.start <= site.end <= len(prompt) for site in sites)
    assert sum(max(site.end - site.start, len(site.rendered)) for site in sites) == fewest_changes(prompt, rendering)


@given(few, few)
@MANY
def test_the_first_site_begins_at_the_first_token_that_differs(prompt, rendering):
    sites = found(prompt, rendering)
    if sites:
        assert sites[0].start == ids.common_head(ids.pack(prompt), ids.pack(rendering))


@pytest.mark.parametrize(
    ("prompt", "rendering", "sites"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], []),
        ([1, 2, 3, 4], [1, 9, 4], [(1, 3, (9,))]),
        ([1, 2, 3], [1, 2, 3, 4], [(3, 3, (4,))]),
        ([1, 2, 3], [2, 3], [(0, 1, ())]),
        ([1, 2, 1, 2, 3], [1, 2, 3], [(2, 4, ())]),
        ([1, 3, 1, 3, 5], [1, 3, 1, 3, 1, 3, 5], [(4, 4, (1, 3))]),
        ([], [7], [(0, 0, (7,))]),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 8, 8, 6], [(1, 2, (9,)), (4, 5, (8, 8))]),
    ],
)
def test_where_sites_are(prompt, rendering, sites):
    assert [(site.start, site.end, site.rendered) for site in found(prompt, rendering)] == sites


def test_a_hundred_thousand_tokens_with_dozens_of_sites():
    """Exact at this size, too. How long it takes is printed, not judged."""
    rng = random.Random(4)
    prompt = [rng.randrange(150_000) if rng.random() < 0.3 else rng.randrange(300) for _ in range(100_000)]
    rendering = list(prompt)
    for _ in range(40):
        at = rng.randrange(len(rendering) - 500)
        rendering[at : at + rng.randrange(2, 400)] = [rng.randrange(150_000)]
    began = time.perf_counter()
    sites = found(prompt, rendering)
    print(f"{len(sites)} sites in {time.perf_counter() - began:.2f} s")
    assert plain_rendering(prompt, sites) == rendering
    assert 30 <= len(sites) <= 200


# --- replies within a prompt -------------------------------------------------------------------------------------------


def find_spans(forest, name):
    turns = {turn.id: turn for turn in forest.turns}
    return [(span.turn, span.start, span.end) for span in causes.own_spans(turns[name], turns, forest.prefix.__getitem__)]


def test_the_replies_in_a_prompt_are_those_of_the_turns_before():
    forest = Forest()
    first = forest.add([1, 2], [10, 11])
    second = forest.add([3], [12], first)
    third = forest.add([4, 5], [13], second)
    assert find_spans(forest, first) == []
    assert find_spans(forest, third) == [(first, 2, 4), (second, 5, 6)]


def test_in_a_resplice_they_are_its_anchors_and_what_is_left_of_its_origin():
    forest = Forest()
    first = forest.add([1, 2], [10, 11])
    second = forest.add([3], [12, 14], first)
    anchor = Anchor(second, 6, 8)
    again = forest.add([1, 2, 10, 11, 3, 9, 12, 14, 5], [13], match="resplice", origin=second, anchors=(anchor,), base=second)
    last = forest.add([6], [15], again)
    assert find_spans(forest, again) == [(first, 2, 4), (second, 6, 8)]
    assert find_spans(forest, last) == [(first, 2, 4), (second, 6, 8), (again, 9, 10)]


def test_sites_are_given_to_the_reply_that_they_touch():
    spans = [Anchor("a", 4, 8), Anchor("b", 12, 15)]
    sites = [Site(0, 1, (), ""), Site(3, 5, (), ""), Site(8, 8, (1,), ""), Site(10, 11, (), ""), Site(14, 20, (), "")]
    assert [site.turn for site in causes.assign_turns(sites, spans)] == ["", "a", "a", "", "b"]


# --- causes ------------------------------------------------------------------------------------------------------------

PIECES = {1: "Sk", 2: "in", 3: "ny", 4: "Skin", 5: "!", 6: "?", 7: "i", 8: "nny"}


def read(asked):
    return ["".join(PIECES.get(token, f"<{token}>") for token in piece) for piece in asked]


def alike(prompt, rendering, spans=()):
    sites = causes.assign_turns(found(prompt, rendering), spans)
    return causes.same_text(sites, read(causes.texts_to_decode(prompt, sites)))


def test_same_words_in_other_tokens():
    assert alike([20, 1, 2, 3, 21], [20, 4, 3, 21]) == [True]
    assert alike([20, 1, 2, 5, 21], [20, 4, 6, 21]) == [False]
    assert alike([20, 1, 2, 30, 31, 32, 33, 5, 21], [20, 4, 30, 31, 32, 33, 6, 21]) == [True, False]


def test_pieces_of_one_word_that_are_paired_crosswise_are_the_same_text():
    """`Sk in` against `Skin`, with an `in` that stands in both: read site by site they would differ."""
    prompt, sites = [1, 2, 3], [Site(0, 1, (1, 7), ""), Site(2, 3, (), "")]
    texts = ["Skinny", "Skinny", "Sk", "Ski", "ny", ""]
    assert len(causes.texts_to_decode(prompt, sites)) == 6
    assert causes.same_text(sites, texts) == [True, True]
    assert causes.same_text(sites, ["Skinny", "Skiny", *texts[2:]]) == [False, False]


SITES = [Site(2, 9, (), "", "a"), Site(12, 14, (5,), "", "a"), Site(20, 20, (7,), "", "b"), Site(30, 31, (), "", "")]
TOLD = {"a": ("args-json", "reasoning-dropped", "whitespace"), "b": ("cd-prefix", "args-json")}


def names(same, *trials):
    return [site.cause for site in causes.name_causes(SITES, same, trials)]


def test_without_a_trial_all_that_reads_otherwise_is_the_template():
    assert names([False, True, False, False]) == ["template", "retokenized", "template", "template"]


def test_a_site_is_due_to_the_member_with_which_most_of_it_vanishes():
    calls = causes.Trial("calls", TOLD, [SITES[0], SITES[1], SITES[3]])
    text = causes.Trial("text", {"a": TOLD["a"]}, [Site(4, 9, (), "", "a"), SITES[1], SITES[3]])
    reasoning = causes.Trial("reasoning", {"a": TOLD["a"]}, [SITES[1], SITES[3]])
    assert names([False] * 4, calls, text, reasoning) == ["reasoning-dropped", "template", "cd-prefix", "template"]


def test_what_is_still_there_when_the_reply_is_whole_is_the_templates():
    reasoning = causes.Trial("reasoning", {"a": TOLD["a"]}, [Site(2, 8, (), "", "a"), *SITES[1:]])
    assert names([False] * 4, reasoning)[0] == "template"


def test_a_reply_that_needed_no_such_rule_is_not_blamed():
    assert names([False] * 4, causes.Trial("reasoning", {"b": ("reasoning-dropped",)}, []))[0] == "template"


def test_every_rule_touches_one_member():
    members = {rule.name: rule.part for rule in RULES.values() if rule.kind != "dialect"}
    assert {name for name, member in members.items() if member == "calls"} == {
        *("args-json", "tool-ids", "cd-prefix", "coerced-values", "trailing-blanks", "default-inserted", "unparsed-input"),
        *("name-lowered", "name-aliased", "name-replaced", "repeated-dropped", "null-dropped", "string-decoded"),
        *("value-wrapped", "null-emptied", "input-as-served", "calls-hidden"),
        *("invalid-tool", "args-repaired", "args-emptied", "invalid-json-wrapped", "malformed-wrapped"),
    }
    assert set(members.values()) == set(causes.PARTS)


def test_replies_are_found_among_the_messages_with_the_rules_that_they_need():
    forest = Forest()
    calls = (ToolCall("c1", "bash", '{"a":  1}'),)
    first = forest.add([1], [10], served=Message("assistant", "Hi ", reasoning="hm", calls=calls))
    second = forest.add([2], [11], first, served=Message("assistant", "Bye"))
    third = forest.add([3], [12], second)
    turns = {turn.id: turn for turn in forest.turns}
    back = Message("assistant", "Hi", calls=(ToolCall("c1", "bash", '{"a": 1}'),))
    said = [Message("user", "?"), Message("assistant", "an example"), back, Message("tool", "1"), Message("assistant", "Bye")]
    told = causes.find_replies(causes.own_spans(turns[third], turns, forest.prefix.__getitem__), turns, said)
    assert told == {first: causes.FoundReply(2, ("args-json", "reasoning-dropped", "whitespace")), second: causes.FoundReply(4, ())}


def test_a_reply_is_put_back_member_by_member():
    served = Message("assistant", "Hi ", reasoning="hm", calls=(ToolCall("c1", "bash", '{"a":  1}'),))
    entry = {"role": "assistant", "content": "Hi", "tool_calls": [{"id": "x", "function": {"name": "b", "arguments": "{}"}}]}
    for member in causes.PARTS:
        entry = causes.restore_part(entry, served, member)
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a":  1}'}}
    assert entry == {"role": "assistant", "content": "Hi ", "reasoning": "hm", "tool_calls": [call]}
    assert "tool_calls" not in causes.restore_part(entry, Message("assistant", "Hi"), "calls")


# --- what it would have cost ---------------------------------------------------------------------------------------------


def drift_of(prompt, rendering):
    sites = found(prompt, rendering)
    return Drift(len(rendering), sum(site.end - site.start for site in sites), tuple(sites))


def test_a_sequence_breaks_where_a_rendering_does_not_go_on_from_the_one_before():
    """The second turn drops what the first said; the third and fourth repeat that, and change nothing more; the fifth does."""
    ids_ = [1, 10, 11, 2, 12, 3, 13, 4, 14, 5, 15]
    places = [(1, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    renderings = [[1], [1, 11, 2], [1, 11, 2, 12, 3], [1, 11, 2, 12, 3, 13, 4], [1, 11, 2, 3, 13, 4, 14, 5]]
    steps = [MeasuredTurn(p, c, drift_of(ids_[:p], told)) for (p, c), told in zip(places, renderings, strict=True)]
    assert break_points(ids_, steps) == [1, 4]
    assert break_points(ids_, steps[:1]) == []
    assert break_points(ids_, [*steps[:2], MeasuredTurn(6, 7, None), *steps[3:]]) is None
