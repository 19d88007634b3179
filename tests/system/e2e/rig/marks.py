"""The marks of a turn, without the one of an engine whose log probabilities are raw: the engines here are as vLLM starts them."""


def marks_of(turn):
    """List the marks of a turn, as it is stored or as JSON has it."""
    marks = turn["marks"] if isinstance(turn, dict) else turn.marks
    return [mark for mark in marks if mark != "raw-logprobs"]
