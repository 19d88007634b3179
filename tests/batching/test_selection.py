"""Selection: each rule drops what it says, and every dropped row is reported with the rule and the reason."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.made import as_trajectory, shape
from tests.core.forest import grow
from tests.core.settings import SOME
from tests.support.work import counting
from tests.trajectories.rollouts import ROLLOUTS, TASK, TOOLS, Talk, of_forest, result, user
from tokencache.batching.selection import (
    at_least,
    complete_only,
    main_line,
    no_discarded_retries,
    no_placeholders,
    no_side_calls,
    policy_logprobs,
    rewarded,
    select,
)
from tokencache.trajectories.lengths import LIMITS, Lengths
from tokencache.trajectories.limiting import limit
from tokencache.trajectories.rollout import rollout
from tokencache.trajectories.values import Link, OverlongFigures, StaleFigures

RULES = [at_least(2), complete_only, main_line, no_discarded_retries, no_side_calls, rewarded]


def kept(trajectory, *rules):
    """The first turns of the sequences that are kept."""
    return [row.sequence.id for row in select([trajectory], *rules, keep_invalid=True).kept]


def linked(trajectory, source, turn, kind="delegation"):
    link = Link(kind=kind, sources=[source], turn=turn, message=1, evidence="equal")
    return msgspec.structs.replace(trajectory, links=[*trajectory.links, link])


def test_without_rules_every_row_is_kept():
    selection = select([shape(name) for name in ROLLOUTS], keep_invalid=True)
    assert len(selection.kept) == sum(len(rollout.sequences) for rollout in ROLLOUTS.values())
    assert selection.dropped == []
    assert selection.without_rows == [rollout.session for rollout in ROLLOUTS.values() if not rollout.sequences]


@SOME
@given(st.integers(0, 2**32), st.lists(st.sampled_from(RULES), max_size=4))
def test_every_row_is_either_kept_or_reported(seed, rules):
    rng = random.Random(seed)
    trajectories = [as_trajectory(of_forest(grow(rng), f"s{n}"), reward=rng.choice([None, 1.0])) for n in range(3)]
    selection = select(trajectories, *rules)
    rows = [*selection.kept, *(dropped.row for dropped in selection.dropped)]
    given_rows = [(trajectory.session, sequence.id) for trajectory in trajectories for sequence in trajectory.sequences]
    assert sorted((row.trajectory.session, row.sequence.id) for row in rows) == sorted(given_rows)
    for row in selection.kept:
        assert not any(rule(*row) for rule in rules)
    for dropped in selection.dropped:
        assert dropped.reason == next(reason for rule in rules if (reason := rule(*dropped.row)))
    with_rows = {row.trajectory.session for row in selection.kept}
    assert selection.without_rows == [trajectory.session for trajectory in trajectories if trajectory.session not in with_rows]


def test_a_side_call_is_dropped_and_a_sub_agent_is_kept():
    assert kept(shape("sub-agent"), no_side_calls) == ["t1", "t2"]


def test_a_session_without_tools_has_no_side_calls():
    assert kept(shape("media"), no_side_calls) == ["t0", "t1"]


@pytest.mark.parametrize("shape_name", ["sub-agent", "media"])
def test_a_single_call_may_be_a_side_call_of_what_a_limit_left_out(shape_name):
    first, *_ = shape(shape_name).sequences
    left = limited(shape_name, "drop", max_length=first.tokens)
    assert [one.id for one in left.sequences] == [first.id]
    selection = select([left], no_side_calls, keep_invalid=True)
    assert (selection.kept, [one.rule for one in selection.dropped]) == ([], ["no_side_calls"])
    assert "fetch without limits" in selection.dropped[0].reason


def test_a_call_whose_answer_returned_is_no_side_call():
    assert kept(linked(shape("sub-agent"), "t0", "t4"), no_side_calls) == ["t0", "t1", "t2"]


@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_the_summary_of_a_compaction_is_no_side_call_if_a_limit_left_out_the_context_that_it_began(overlong):
    talk, words = Talk(), "They counted the lines of a.py: twelve."
    main = talk.call(TASK, calls=[("c1", "bash", "{}")], tools=TOOLS)
    talk.call([*talk.history(main), result("c1", "12 a.py")], "Twelve.", after=main, tools=TOOLS)
    summary = talk.call([user("Summarize.")], words)
    talk.call([user(f"{words}{'-' * 500}")], "And b.py?", tools=TOOLS)
    left = as_trajectory(limit(rollout(talk.records()), Lengths(overlong, max_length=500)))
    assert kept(left, no_side_calls) == [main, summary]


def test_a_row_whose_log_probabilities_are_not_the_policys_is_dropped():
    whole = shape("sub-agent")
    first, *others = whole.sequences
    turn = msgspec.structs.replace(first.turns[-1], marks=("raw-logprobs",))
    marked = msgspec.structs.replace(first, turns=[*first.turns[:-1], turn])
    trajectory = msgspec.structs.replace(whole, sequences=[marked, *others])
    assert kept(trajectory, policy_logprobs) == [sequence.id for sequence in others]
    (dropped,) = select([trajectory], policy_logprobs, keep_invalid=True).dropped
    assert f"turn {turn.turn}" in dropped.reason


def test_a_discarded_retry_is_dropped():
    assert kept(shape("thrown-away"), no_discarded_retries) == ["t0"]
    assert kept(linked(shape("thrown-away"), "t1", "t3"), no_discarded_retries) == ["t0", "t1"]


def test_the_main_line_has_neither_side_calls_nor_sub_agents_nor_retries():
    assert kept(shape("sub-agent"), main_line) == ["t1"]
    assert kept(shape("thrown-away"), main_line) == ["t0"]


def test_an_attempt_that_broke_off_is_not_the_main_line_of_a_rollout_with_one_call():
    """The call was made again, and the client received that reply."""
    trajectory = shape("thrown-away")
    first, second = (msgspec.structs.replace(one, parent=None, turns=one.turns[:1]) for one in trajectory.sequences)
    cut = msgspec.structs.replace(first, turns=[msgspec.structs.replace(first.turns[0], marks=("engine-aborted",))])
    assert kept(msgspec.structs.replace(trajectory, sequences=[cut, second]), main_line) == ["t1"]
    assert kept(msgspec.structs.replace(trajectory, sequences=[first, second]), main_line) == ["t0"]


def test_a_main_line_whose_last_reply_broke_off_stays_the_main_line():
    """A sub-agent that made as many calls is none."""
    trajectory = shape("sub-agent")
    title, main, *others = trajectory.sequences
    cut = msgspec.structs.replace(main, turns=[main.turns[0], msgspec.structs.replace(main.turns[1], marks=("engine-aborted",))])
    assert [len(one.turns) for one in others] == [len(main.turns)]
    assert kept(msgspec.structs.replace(trajectory, sequences=[title, cut, *others]), main_line) == [main.id]


def test_the_main_line_continues_after_an_edit_of_the_context():
    assert kept(shape("respliced"), main_line) == ["t0", "t2"]


def test_a_fork_with_an_edited_context_is_not_on_the_main_line():
    """The main line had later turns of its own, so the edited sequence did not take over."""
    trajectory = shape("respliced")
    first, edited = trajectory.sequences
    later = msgspec.structs.replace(first.turns[-1], created=edited.turns[-1].created + 1)
    first = msgspec.structs.replace(first, turns=[*first.turns[:-1], later])
    assert kept(msgspec.structs.replace(trajectory, sequences=[first, edited]), main_line) == ["t0"]


def after_the_end(trajectory, **changes):
    """The second sequence began after the first one had ended; also changes its labels."""
    first, second = trajectory.sequences
    turn = msgspec.structs.replace(second.turns[0], created=first.turns[-1].created + 1)
    second = msgspec.structs.replace(second, turns=[turn, *second.turns[1:]], **changes)
    return msgspec.structs.replace(trajectory, sequences=[first, second])


def test_a_branch_after_the_end_is_not_on_the_main_line():
    assert kept(after_the_end(shape("thrown-away")), main_line) == ["t0"]


def test_a_side_call_after_the_end_is_not_on_the_main_line():
    assert kept(after_the_end(shape("respliced")), main_line) == ["t0", "t2"]
    assert kept(after_the_end(shape("respliced"), tools=0, continued=False), main_line) == ["t0"]


def compacted():
    """A rollout of two turns, its summary by a branch, and a new root that begins with the summary."""
    trajectory = shape("thrown-away")
    main, summary = trajectory.sequences
    new = msgspec.structs.replace(main, id="n0", root="n0", turns=[msgspec.structs.replace(main.turns[-1], turn="n0")])
    return msgspec.structs.replace(trajectory, sequences=[main, summary, new])


def test_the_main_line_continues_after_a_summary():
    assert kept(compacted(), main_line) == ["t0"]
    assert kept(linked(compacted(), "t1", "n0", kind="compaction"), main_line) == ["t0", "t1", "n0"]


def test_a_summary_that_several_turns_may_have_written_is_no_evidence():
    several = Link(kind="compaction", sources=["t1", "t0"], turn="n0", message=1, evidence="contained")
    assert kept(msgspec.structs.replace(compacted(), links=[several]), main_line) == ["t0"]


def test_a_link_to_turns_that_were_left_out_is_ignored():
    trajectory = linked(linked(compacted(), "gone", "n0", kind="compaction"), "t1", "gone", kind="compaction")
    assert kept(trajectory, main_line) == ["t0"]


def limited(name, overlong, **lengths):
    return as_trajectory(limit(ROLLOUTS[name], Lengths(overlong, **lengths)))


def test_the_main_line_is_not_replaced_by_what_a_limit_leaves():
    title, main, *_ = shape("sub-agent").sequences
    assert (len(title.turns), len(main.turns)) == (1, 2)
    for overlong, most in (("drop", main.tokens - 1), ("cut", main.turns[0].completion[1] - 1)):
        without = limited("sub-agent", overlong, max_length=most)
        assert title.id in [one.id for one in without.sequences]
        assert main.id not in [one.id for one in without.sequences]
        selection = select([without], main_line, keep_invalid=True)
        assert selection.kept == []
        assert "a limit left out turns" in selection.dropped[0].reason


def test_a_main_line_that_is_cut_stays_the_main_line():
    title, main, *_ = shape("sub-agent").sequences
    cut = limited("sub-agent", "cut", max_length=main.tokens - 1)
    assert [(one.id, len(one.turns)) for one in cut.sequences][:2] == [(title.id, 1), (main.id, 1)]
    assert kept(cut, main_line) == [main.id]


@pytest.mark.parametrize(("source", "follows"), [(0, False), (2, True)], ids=["fork", "edit-at-the-end"])
def test_what_followed_the_main_line_is_known_after_it_is_cut(source, follows):
    talk = Talk()
    turns = [talk.call(TASK, calls=[("c0", "bash", "{}")], tools=TOOLS)]
    for n in (0, 1):
        history = [*talk.history(turns[n]), result(f"c{n}", "12 a.py")]
        turns.append(talk.call(history, calls=[(f"c{n + 1}", "bash", "{}")], after=turns[n], tools=TOOLS))
    edited = talk.call([user("Shorter.")], "OK", tools=TOOLS, match="resplice", origin=turns[source])
    talk.change(edited, created=talk.turns[source].created + 1.5)
    made = rollout(talk.records())
    end = made.sequences[0].turns[1].completion[1]
    for trajectory in (as_trajectory(made), as_trajectory(limit(made, Lengths("cut", max_length=end)))):
        assert kept(trajectory, main_line) == [turns[0], *([edited] if follows else [])]


def test_a_limit_that_leaves_out_a_small_branch_keeps_the_main_line():
    retry = shape("thrown-away").sequences[1]
    assert kept(limited("thrown-away", "drop", max_length=retry.tokens), main_line) == []
    trajectory = shape("thrown-away")
    left_out = OverlongFigures(policy="drop", limits={}, dropped=1, turns=["t1"])
    figures = msgspec.structs.replace(trajectory.figures, overlong=left_out)
    assert kept(msgspec.structs.replace(trajectory, sequences=trajectory.sequences[:1], figures=figures), main_line) == ["t0"]


def timed(forest, rng):
    """Give turns the times at which they began, some at once with others, and tools to some."""
    began = {}
    for n, turn in enumerate(forest.turns):
        before = max(began.get(turn.parent, 0), began.get(turn.origin, 0))
        began[turn.id] = max(before, n + rng.choice([0.0, 0.5, 1.5]))
    forest.turns = [msgspec.structs.replace(turn, created=began[turn.id], tools=rng.choice([0, 1, 1]), model="m") for turn in forest.turns]
    return forest


def random_summaries(made, rng):
    """Some roots begin with the summary of an earlier turn; of some it is not known which turn wrote it."""
    turns = sorted((span.turn for sequence in made.sequences for span in sequence.turns), key=lambda turn: int(turn.id[1:]))
    for place, turn in enumerate(turns):
        if place and turn.parent is None and rng.random() < 0.5:
            sources = [one.id for one in rng.choices(turns[:place], k=rng.choice([1, 1, 2]))]
            yield Link(kind="compaction", sources=sources, turn=turn.id, message=0, evidence="equal")


def stale(made, rng):
    """Leave out some sequences, as a limit of lag does."""
    left = [sequence for sequence in made.sequences if rng.random() < 0.7]
    turns = [span.turn.id for sequence in made.sequences if sequence not in left for span in sequence.turns]
    figures = msgspec.structs.replace(made.figures, stale=StaleFigures(max_lag=1, current="3", turns=turns))
    return msgspec.structs.replace(made, sequences=tuple(left), weights=(0.0,) * len(left), figures=figures)


@pytest.mark.parametrize("rule", [main_line, no_discarded_retries, no_side_calls])
@pytest.mark.parametrize("overlong", ["drop", "cut"])
@SOME
@given(seed=st.integers(0, 2**32))
def test_a_limit_lets_no_rule_keep_a_row_that_it_drops_from_the_whole_rollout(rule, overlong, seed):
    rng = random.Random(seed)
    made = of_forest(timed(grow(rng), rng))
    links = [*random_summaries(made, rng)]
    allowed = {*kept(as_trajectory(made, links=links), rule)}
    for length in {span.completion[1] for sequence in made.sequences for span in sequence.turns}:
        for name in LIMITS:
            left = limit(made, Lengths(overlong, **{name: max(1, length - rng.randint(0, 2))}))
            left = stale(left, rng) if rng.random() < 0.3 else left
            assert {*kept(as_trajectory(left, links=links), rule)} <= allowed


def test_a_sequence_whose_start_a_limit_left_out_is_no_main_line():
    talk = Talk()
    first = talk.call(TASK, calls=[("c0", "bash", "{}")], tools=TOOLS)
    talk.call([*talk.history(first), result("c0", "12 a.py" * 90)], calls=[("c1", "bash", "{}")], after=first, tools=TOOLS)
    edited = talk.call([user("Shorter.")], calls=[("c2", "bash", "{}")], tools=TOOLS, match="resplice", origin=first)
    talk.change(edited, created=talk.turns[1].created - 0.5)
    later = talk.call([*talk.history(edited), result("c2", "2")], calls=[("c3", "bash", "{}")], after=edited, tools=TOOLS)
    talk.call([*talk.history(later), result("c3", "3")], "OK", after=later, tools=TOOLS)
    assert kept(as_trajectory(rollout(talk.records())), main_line) == [first]
    left = as_trajectory(limit(rollout(talk.records()), Lengths("drop", max_length=500)))
    assert [sequence.id for sequence in left.sequences] == [edited]
    (dropped,) = select([left], main_line, keep_invalid=True).dropped
    assert "a limit left out turns" in dropped.reason


@pytest.mark.parametrize("rule", [main_line, no_discarded_retries, no_placeholders, no_side_calls])
def test_the_work_of_a_rule_grows_with_the_number_of_sequences(rule):
    whole = shape("thrown-away")
    main, retry = whole.sequences
    branches = [
        msgspec.structs.replace(retry, id=f"b{n}", turns=[msgspec.structs.replace(retry.turns[0], turn=f"b{n}")]) for n in range(400)
    ]
    few, many = (msgspec.structs.replace(whole, sequences=[main, *branches[:n]]) for n in (100, 400))
    with counting() as work:
        small, large = (work.of(lambda one=one: select([one], rule, keep_invalid=True)) for one in (few, many))
    assert large < 5 * small


def test_an_incomplete_session_is_dropped_with_its_incidents():
    for selection in (select([shape("aborted")], complete_only, keep_invalid=True), select([shape("aborted")])):
        assert {dropped.reason for dropped in selection.dropped} == {"the session is not complete: call-open"}
        assert selection.kept == []


def test_a_failed_session_is_dropped_with_its_failure_unless_invalid_ones_are_kept():
    failed = shape("linear", outcome="sandbox", outcome_detail="no disk", reward=1.0)
    (dropped,) = select([failed], rewarded).dropped
    assert (dropped.rule, dropped.reason) == ("valid_only", "the rollout failed: sandbox (no disk)")
    assert kept(failed, rewarded) == ["t0"]


def test_a_session_without_a_reward_is_dropped():
    assert kept(shape("linear"), rewarded) == []
    assert kept(shape("linear", reward=0.0), rewarded) == ["t0"]


@pytest.mark.parametrize("name", ["linear", "without-logprobs", "speechless"])
def test_rows_with_too_few_trainable_tokens_are_dropped(name):
    trajectory = shape(name)
    own = sum(trajectory.sequences[0].loss_mask)
    assert kept(trajectory, at_least(own)) == ["t0"]
    assert kept(trajectory, at_least(own + 1)) == []


def test_the_report_names_rules_tokens_and_sessions():
    selection = select([shape("sub-agent"), shape("empty")], no_side_calls)
    rows, tokens = len(selection.kept), sum(sum(row.sequence.loss_mask) for row in selection.kept)
    lost = sum(selection.dropped[0].row.sequence.loss_mask)
    assert selection.report().splitlines() == [
        f"kept: {rows} rows, {tokens} trainable tokens",
        f"dropped: 1 row, {lost} trainable tokens",
        f"  no_side_calls: 1 row, {lost} trainable tokens",
        "sessions without a row: empty",
    ]
    assert str(selection.dropped[0]) == (
        "session sub-agent, sequence t0: is a side call: it offers no tools, and no later call continues it (no_side_calls)"
    )


def test_a_rule_of_your_own():
    def short(trajectory, sequence):
        return "is too long" if sequence.tokens > 1 else ""

    (dropped,) = select([shape("linear")], short).dropped
    assert (dropped.rule, dropped.reason) == ("short", "is too long")
