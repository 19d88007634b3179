"""Tests the parts of the published drift rates: a tidy script, and a replay that is measured at every turn."""

from pathlib import Path

import pytest

from tests.support.material import require
from tests.system.corpus.drift import ADDED, PLAIN, qwen3, replayed, tidied, tidy
from tests.system.corpus.format import read
from tokencache.testing import build_tokenizer

FILE = next(Path(__file__).parent.glob("mini-swe-agent-*.jsonl"))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1.0}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "tidy_"),
    [
        ("<think>\n  hm\n\n</think>\n\n\n  Look.  \n", "<think>\nhm\n</think>\n\nLook."),
        ('Look.  \n\n<tool_call>\n{"name":"f",  "arguments":{"a":1.0}}\n</tool_call>', f"Look.\n{CALL}"),
        ('<think>\n\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a":1.0}}</tool_call>', f"<think>\n\n</think>\n\n{CALL}"),
        ("<tool_call>\nno json\n</tool_call>", "<tool_call>\nno json\n</tool_call>"),
    ],
)
def test_tidied(said, tidy_):
    assert tidied(said) == tidy_
    assert tidied(tidy_) == tidy_


async def test_a_tidy_session_is_measured_at_every_turn():
    recording = read(FILE)
    tidy(recording)
    exported = await replayed(recording, build_tokenizer())
    drift = exported["figures"]["drift"]
    assert exported["complete"]
    assert drift["measured"] == len(recording.calls) - 1
    assert drift["unmeasured"] == {}
    assert set(drift["causes"]) == {"template"}


@pytest.mark.whole
def test_the_vocabulary_is_qwen3s():
    tokenizer = require("../shared", qwen3())
    some = ("<|endoftext|>", "<|im_end|>", "<tool_call>", "</think>")
    assert [tokenizer.id_of(token) for token in some] == [151643, 151645, 151657, 151668]
    assert len(ADDED) + len(PLAIN) == 26
