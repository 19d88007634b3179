"""What vLLM 0.32's tool parsers drop: each reply of `tests/core/lost_text.json`, read by the parsers themselves."""

import json
import re
from pathlib import Path

import pytest
from test_parsers import Parsers

import tests.core

PARSERS = json.loads(Path(tests.core.__file__).with_name("lost_text.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    made = Parsers(tmp_path_factory.mktemp("tokenizer"))
    yield made
    made.close()


@pytest.mark.parametrize("name", PARSERS)
def test_replies_are_read_as_recorded(parsers, name):
    tokens = [*re.findall(r"<[^<>\s]+>", PARSERS[name]["rendering"]), "<|python_tag|>"]  # Llama's parser looks that one up
    for kind, reply in PARSERS[name]["replies"].items():
        assert parsers.ask("calls", name, tokens, reply["text"]) == [reply["whole"], reply["stream"]], kind
