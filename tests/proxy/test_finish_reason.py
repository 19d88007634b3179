"""How a reply ended, by its ids, its limit and what the engine says."""

from types import SimpleNamespace

import msgspec
import pytest

from tokencache.engine.probe import Capability
from tokencache.engine.reply import Choice
from tokencache.proxy.recorder import finish_reason

END, OTHER_END = 90, 91


def ended(said, *ids, stops=(END,), stop_reason=None, room=1000, **asked):
    choice = Choice()
    choice.ids, choice.finish_reason, choice.stop_reason = list(ids), said, stop_reason
    found = Capability("m", "exact", max_model_len=room, turn_ends=(OTHER_END,))
    model = SimpleNamespace(stop_ids=set(stops), stops_by_itself=bool(stops), capability=found)
    return finish_reason(choice, {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in asked.items()}, 10, model)


@pytest.mark.parametrize("said", ["tool_calls", "function_call", "stop", "repetition", "of-a-later-version"])
def test_as_many_ids_as_the_limit_and_no_stop_id_at_the_end(said):
    assert ended(said, 1, 2, 3, max_tokens=3) == "length"
    assert ended(said, 1, 2, 3, max_completion_tokens=3) == "length"
    assert ended(said, 1, 2, 3, max_completion_tokens=3, max_tokens=5) == "length"
    assert ended(said, 1, 2, 3, max_completion_tokens=None, max_tokens=3) == "length"
    assert ended(said, 1, 2, 3, room=13) == "length"
    assert ended(said, 1, 2, 3, max_tokens=50, room=13) == "length"


@pytest.mark.parametrize(
    ("ids", "facts"),
    [
        ((1, 2), {"max_tokens": 3}),
        ((1, 2, 3), {}),
        ((1, 2, 3), {"max_completion_tokens": 5, "max_tokens": 3}),  # vLLM reads the first
        ((1, 2, END), {"max_tokens": 3}),
        ((1, 2, OTHER_END), {"max_tokens": 3}),  # the template ends the turn with it
        ((1, 2, 7), {"max_tokens": 3, "stop_token_ids": [7]}),
        ((1, 2, 7), {"max_tokens": 3, "stop_reason": 7}),  # a stop id that only the engine knows
        ((1, 2, 7), {"max_tokens": 3, "stop_reason": "HALT"}),
        ((1, 2, 3), {"max_tokens": 3, "stops": ()}),  # 3 may be the model's stop id
        ((), {"max_tokens": 0}),
    ],
)
def test_the_engines_word_stays_if_the_ids_do_not_prove_a_cut(ids, facts):
    assert ended("tool_calls", *ids, **facts) == "tool_calls"


@pytest.mark.parametrize("said", ["length", "abort", "error", None])
def test_a_reply_that_the_engine_broke_off(said):
    assert ended(said, 1, 2, 3, max_tokens=3) == said


def test_an_engine_that_was_not_probed():
    choice = Choice()
    choice.ids, choice.finish_reason = [1], "tool_calls"
    assert finish_reason(choice, {"max_tokens": msgspec.Raw(b"1")}, 10, None) == "tool_calls"
