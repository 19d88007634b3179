"""The simulated model's chat template renders histories as Qwen3's does."""

from tokencache.testing import build_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "description": "dé", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}


def render(messages, tools=None, **kwargs):
    return build_tokenizer().render(messages, tools, **kwargs)


def test_a_turn_ends_with_the_stop_token_and_a_newline_that_the_model_never_emits():
    text = render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nho<|im_end|>\n"


def test_generation_prompt_with_and_without_thinking():
    assert render([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render([{"role": "user", "content": "hi"}], enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")


def test_thinking_stays_in_a_tool_round_and_is_dropped_at_the_next_query():
    said = {"role": "assistant", "content": "ok", "reasoning_content": "why", "tool_calls": [CALL]}
    history = [{"role": "user", "content": "go"}, said, {"role": "tool", "content": "r"}]
    assert "<think>\nwhy\n</think>\n\nok\n<tool_call>" in render(history)
    later = render([*history, {"role": "user", "content": "more"}])
    assert "why" not in later
    assert "<|im_start|>assistant\nok\n<tool_call>" in later


def test_calls_are_written_again_and_consecutive_results_are_one_user_turn():
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n" in render(history)


def test_tools_are_in_the_system_turn_after_its_text():
    text = render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert (
        '\n<tools>\n{"type": "function", "function": {"name": "f", "description": "dé", "parameters": {"type": "object"}}}\n</tools>\n'
        in text
    )
