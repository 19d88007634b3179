"""What real programs send back as text: the summaries and answers that they return are linked, and nothing else is.

Links also lead the main line of a rollout through a compaction. `test_corpus` compares both, in every recorded session, with what is listed
here.
"""

import copy
import json
from pathlib import Path

import msgspec
import pytest

from tests.support.pairwise import some
from tests.system.corpus.format import read
from tests.system.corpus.replay import replay
from tokencache.batching.selection import select
from tokencache.trajectories.values import Trajectory

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.jsonl"))}

LINKS = {
    "claude-code_agents-2.1.329": {"kind": "delegation", "sources": [4, 7], "turn": 8},  # both gave the same answer
    "claude-code_compact-2.1.329": {"kind": "compaction", "sources": [4], "turn": 5},
    "codex_agents-0.169.0": {"kind": "delegation", "sources": [5], "turn": 6},
    "opencode_task-1.18.33": {"kind": "delegation", "sources": [5], "turn": 6},
}
"""The only link of each file that has one, with the numbers of its calls."""

BESIDE = {
    "browser-use_images-0.13.14": [2, 3, 4, 5],  # no call contains an earlier reply: each is a line of one call
    "claude-code_agents-2.1.329": [2, 3, 4, 5, 6, 7],  # two sub-agents
    "claude-code_fork-2.1.329": [4],
    "claude-code_heard-2.1.329": [1],  # it broke off, and the call after it has no parent: its reply is not recognized
    "codex_agents-0.169.0": [3, 4, 5],
    "opencode-1.18.33": [1],  # a title
    "opencode_images-1.18.33": [1],
    "opencode_task-1.18.33": [1, 3, 4, 5],
}
"""The calls of each file that are not on the main line."""

SIDE_CALLS = {"opencode-1.18.33": [1], "opencode_images-1.18.33": [1], "opencode_task-1.18.33": [1]}


def links(replayed):
    return [
        {"kind": link["kind"], "sources": [*map(replayed.call_of, link["sources"])], "turn": replayed.call_of(link["turn"])}
        for link in replayed.exported["links"]
    ]


def dropped(replayed, rule):
    """The calls of the sequences that a rule drops."""
    selection = select([msgspec.convert(replayed.exported, Trajectory)], rule)
    return sorted(replayed.call_of(turn.turn) for one in selection.dropped for turn in one.row.sequence.turns)


@pytest.mark.parametrize("name", some(LINKS, 1))
async def test_an_answer_that_returns_with_another_word_is_not_linked(name):
    recording = copy.deepcopy(read(FILES[name]))
    changed = {"made.txt was made": "made.txt was lost", "Nothing there": "Something there"}
    call = recording.calls[LINKS[name]["turn"] - 1]
    before = body = json.dumps(call.body, ensure_ascii=False)
    for text, other in changed.items():
        body = body.replace(text, other)
    assert body != before
    call.body = json.loads(body)
    assert all(link["turn"] != call.call for link in links(await replay(recording)))
