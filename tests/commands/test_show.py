"""`tokencache show` prints why a rollout split and what is missing, in few lines."""

import io

import msgspec
from rich.console import Console

from tests.core.forest import Forest
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tests.trajectories.test_links import delegated
from tokencache.client import Trajectory
from tokencache.commands.show import tree_lines
from tokencache.core.incidents import IncidentKind
from tokencache.trajectories.changes import Comparisons
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.rollout import rollout


def shown(made, *, width=100, unfold=False, terminal=False, lost=(), not_compared=()):
    rollout = msgspec.convert(msgspec.to_builtins(native(made)), Trajectory)
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=terminal, highlight=False, color_system="standard" if terminal else None)
    turns = sorted((span.turn for sequence in made.sequences for span in sequence.turns), key=lambda turn: int(turn.id[1:]))
    lost, not_compared = dict(lost), dict(not_compared)
    changes = [
        msgspec.structs.replace(change, lost=lost.get(change.turn, []), not_compared=not_compared.get(change.turn, ""))
        for change in Comparisons(turns, made.contexts).all()
    ]
    for line in tree_lines(rollout, changes, unfold=unfold):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    return output.getvalue()


def test_a_branch_is_shown_below_the_turn_that_it_left():
    text = shown(ROLLOUTS["thrown-away"])
    output = [line.rstrip() for line in text.splitlines()]
    where = {
        name: next(i for i, line in enumerate(output) if f" {name} " in line and "sampled" in line) for name in ("t0", "t1", "t2", "t3")
    }
    assert where["t0"] < where["t1"] < where["t2"] < where["t3"]
    assert "● branch t1 off t0: 1 turn, " in text
    assert "not continued" in output[where["t1"] - 1]
    assert output[where["t1"]].startswith("│ │ ")


def test_the_label_of_a_turn_is_its_place_in_the_tree():
    """The thrown-away answer was recorded as `continue`, and the turn that replaced it as `branch`; the tree shows what became of them."""
    text = shown(ROLLOUTS["thrown-away"])
    label = {row.split()[1]: row.split()[2] for row in text.replace("│", "").splitlines() if "sampled" in row}
    assert label == {"t0": "root", "t1": "branch", "t2": "continue", "t3": "continue"}
    assert "sequences start as: branch 1, root 1" in text


def test_the_reason_of_a_split_is_shown():
    assert "● plain rewritten-reply t1" in shown(ROLLOUTS["unrecognized"])
    assert "● resplice context-edited t2 off t1: 2 turns, " in shown(ROLLOUTS["respliced"])


def test_a_line_says_what_changed_in_the_request_of_a_turn_that_does_not_simply_continue():
    text = shown(ROLLOUTS["respliced"], width=200)
    assert [line.strip("│ ") for line in text.splitlines() if "compared" in line] == [
        "compared with turn 1: message 0, system, differs: code. → code, briefly."
    ]
    assert "compared with turn 2: the same messages" in shown(ROLLOUTS["thrown-away"], width=200)


def test_what_a_parser_dropped_is_quoted_and_counted():
    text = shown(ROLLOUTS["linear"], width=200, lost={"t1": ["Then I\nread."]}, not_compared={"t0": "broken-off"})
    assert "lost to the parser: 12 characters, in 1 of 2 turns, 1 not compared" in text
    assert "  lost-text" in text
    assert "lost to the parser: Then I read." in text
    assert "lost" not in shown(ROLLOUTS["linear"], width=200)


def test_links_and_failed_calls_are_shown():
    talk, _, _ = delegated("Twelve lines, none of them blank.", "Twelve lines, none of them blank.")
    talk.incidents += [
        IncidentKind.UPSTREAM_DOWN.incident("refused", at=2.0, call="c-failed"),
        IncidentKind.NOTHING_RECEIVED.incident("gone", at=3.0, call="c-other"),
        IncidentKind.HELD.incident("1 s", at=1.0, call="c-other"),
        IncidentKind.CLIENT_GONE.incident("gone", at=3.0, call="t0", turn="t0"),
        IncidentKind.CALL_OPEN.incident("open", at=3.0, call="c-open"),
    ]
    text = shown(rollout(talk.records()), width=200)
    assert "3 calls, 2 failed calls, 3 turns, " in text
    assert "delegation: message 3 holds the answer of turn 1" in text


def test_figures_marks_rules_and_incidents():
    text = shown(ROLLOUTS["aborted"], width=200)
    assert "session aborted  INCOMPLETE  sealed  began 20" in text
    assert "3 calls, 3 turns, 2 sequences, " in text
    assert "1 call, 1 turn, 1 sequence, " in shown(ROLLOUTS["speechless"], width=200)
    assert "no finish reason  aborted  incident" in text
    assert "client-gone  " in text
    assert "left after 6 tokens" in text
    assert "call-open (data is missing)  call c-open" in text
    text = shown(ROLLOUTS["linear"], width=200)
    assert "session linear  complete" in text
    assert "applied rules: args-json 2, reasoning-left-out 1" in text
    assert "drift avoided: 9 tokens, in 1 of 1 turns measured" in text
    assert "incidents" not in text


def long(turns=200):
    forest, parent = Forest(), None
    for n in range(turns):
        rules = ("args-json",) if n % 2 else ()
        parent = forest.add(
            [1, 2], [3, 4, 5], parent, finish_reason="tool_calls", applied_rules=rules, marks=("aborted",) if n == 100 else ()
        )
    return of_forest(forest)


def test_a_long_session_is_folded_except_for_noteworthy_turns():
    text = shown(long())
    assert len(text.splitlines()) < 15
    assert "⋮ 99 turns         continue     +198      297 sampled  rules args-json 50" in text
    assert " 100 t100             continue       +2        3 sampled  tool_calls  aborted" in text
    assert "⋮ 98 turns" in text
    assert "   0 t0 " in text
    assert " 199 t199 " in text
    unfolded = shown(long(), unfold=True)
    assert all(f" t{n} " in unfolded for n in range(200))
    assert "⋮" not in unfolded


def test_deeply_nested_sequences_stay_readable():
    forest, parent = Forest(), None
    for n in range(300):
        parent = forest.add([n], [7], base=parent, match="resplice" if n else "root", origin=parent, reason="context-edited" if n else "")
    text = shown(of_forest(forest), width=80)
    assert text.count("● resplice") == 299
    assert "off t298" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_no_colour_unless_the_output_is_a_terminal():
    assert "\x1b" not in shown(ROLLOUTS["aborted"])
    assert "\x1b[" in shown(ROLLOUTS["aborted"], terminal=True)


def test_control_characters_do_not_reach_the_terminal():
    rollout = ROLLOUTS["lost"]
    nasty = msgspec.structs.replace(rollout.incidents[0], detail="[red]\x1b]0;owned\x07\nnext [/]")
    text = shown(msgspec.structs.replace(rollout, incidents=(nasty,)), width=200)
    assert "[red] ]0;owned  next [/]" in text
    assert "\x1b" not in text


def test_policy_versions_are_shown_with_the_turns_where_there_are_several():
    heading, _, tree = shown(ROLLOUTS["linear"], width=200).partition("\n\n")
    assert "policy versions: 7 " in heading
    assert "version" not in tree
    text = shown(ROLLOUTS["cut-off"], width=200)
    assert "policy versions: 7 8, 8 3 trainable tokens" in text
    assert [line.partition("version ")[2].strip() for line in text.splitlines() if "sampled" in line] == ["7", "7 8"]
