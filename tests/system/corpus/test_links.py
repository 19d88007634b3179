"""What real programs send back as text: the summaries and answers that they return are linked, and nothing else is."""

import copy
import json
from pathlib import Path

import pytest

from tests.system.corpus.format import read
from tests.system.corpus.replay import replay

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.jsonl"))}

EXPECTED = {
    "claude-code_agents-2.1.329": {"kind": "delegation", "sources": [4, 7], "turn": 8},  # both gave the same answer
    "claude-code_compact-2.1.329": {"kind": "compaction", "sources": [4], "turn": 5},
    "codex_agents-0.169.0": {"kind": "delegation", "sources": [5], "turn": 6},
    "opencode_task-1.18.33": {"kind": "delegation", "sources": [5], "turn": 6},
}
"""The only link of each file that has one, with the numbers of its calls."""


def without_place(links):
    return [{name: link[name] for name in ("kind", "sources", "turn")} for link in links]


@pytest.mark.parametrize("name", FILES)
async def test_exactly_the_answers_that_return_are_linked(name):
    replayed = await replay(read(FILES[name]))
    assert without_place(replayed.links) == ([EXPECTED[name]] if name in EXPECTED else [])


@pytest.mark.parametrize("name", EXPECTED)
async def test_an_answer_that_returns_with_another_word_is_not_linked(name):
    recording = copy.deepcopy(read(FILES[name]))
    changed = {"made.txt was made": "made.txt was lost", "Nothing there": "Something there"}
    call = recording.calls[EXPECTED[name]["turn"] - 1]
    body = json.dumps(call.body, ensure_ascii=False)
    for text, other in changed.items():
        body = body.replace(text, other)
    assert body != json.dumps(call.body, ensure_ascii=False)
    call.body = json.loads(body)
    replayed = await replay(recording)
    assert all(link["turn"] != call.call for link in replayed.links)
