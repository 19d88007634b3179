"""Which requests may be continued after a cut, and what the request for the next piece says (measured on vLLM 0.32)."""

import msgspec
import pytest

from tokencache.proxy.continuation import reason_against, remaining_fields

PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def raw(**members):
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in {**PLAIN, **members}.items()}


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"logit_bias": {"5": 1}, "allowed_token_ids": [5, 6], "repetition_penalty": 1.1},
        {"max_tokens": 10, "min_tokens": 2, "max_completion_tokens": 10},
        {"thinking_token_budget": 10, "stop_token_ids": [5], "ignore_eos": True, "seed": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "stop": None, "bad_words": [], "n": 1},
        {"tools": [CALL], "tool_choice": "auto", "parallel_tool_calls": False},
        {"response_format": {"type": "text"}, "stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_these_survive_a_cut(members):
    assert not reason_against(raw(**members))


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"bad_words": ["a b"]}, "bad_words"),
        ({"stop": ["Observation:"]}, "stop"),
        ({"stop": "x"}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "[0-9]{8}"}}, "structured_outputs"),
        ({"tool_choice": "required", "tools": [CALL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [CALL]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "strict tool"),
        ({"n": 2}, "n "),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
        ({"a_member_of_a_later_version": 1}, "a_member_of_a_later_version"),
    ],
)
def test_these_do_not_and_the_turn_names_them(members, named):
    assert named in reason_against(raw(**members))


def test_a_text_completion_is_not_continued():
    assert reason_against({"model": msgspec.Raw(b'"m"'), "prompt": msgspec.Raw(b'"a"')}) == "text completions are not continued"


def test_limits_are_reduced_by_what_was_sampled():
    left = remaining_fields(raw(max_tokens=10, max_completion_tokens=12, min_tokens=5), 4, 1)
    assert [bytes(left[name]) for name in ("max_tokens", "max_completion_tokens", "min_tokens")] == [b"6", b"8", b"1"]
    assert bytes(remaining_fields(raw(min_tokens=5), 9, 1)["min_tokens"]) == b"0"


def test_each_piece_has_a_seed_of_its_own():
    fields = raw(seed=7)
    seeds = [bytes(remaining_fields(fields, 4, piece)["seed"]) for piece in (1, 2, 3)]
    assert len({b"7", *seeds}) == 4
    assert bytes(remaining_fields(fields, 9, 1)["seed"]) == seeds[0]
    assert "seed" not in remaining_fields(raw(), 4, 1)


def test_the_engines_own_limit_is_reduced_too():
    assert bytes(remaining_fields(raw(), 4, 1, own_limit=10)["max_tokens"]) == b"6"
    assert "max_tokens" not in remaining_fields(raw(), 4, 1)
