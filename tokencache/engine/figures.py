"""Decides what the figures of an engine's reply prove: which of its ids were certainly sampled, and whether they can be trained.

An engine may be broken, and a gateway in front of it may lose, double, cut or move parts of a reply. So nothing is trusted because it
arrived. `judge` compares the figures of a reply with each other, whole or streamed, from every driver. What is not certain is not recorded:

==================================================  ==========================================================================
figure                                              what follows if it is wrong
==================================================  ==========================================================================
ids beside text, calls or log probabilities         without them: the hole `no-token-ids`, and none is recorded
each id is in the model's vocabulary                the hole `inconsistent-reply`, and none is recorded
the number of ids is the one in `usage`             the same; up to the last right number if each event has a `usage`
`usage` is there, if the engine has it when probed  the same
nothing is sampled after a choice's finish reason   the same
the choices are those that were requested           the same
every event can be read                             the hole `unreadable-reply`; the ids before that event are recorded
the length of the prompt is the one in `usage`      the hole `inconsistent-reply`, and no turn is recorded
each id of a prompt of text is in the vocabulary    the same
as many log probabilities as ids in each event      the ids get loss mask 0, and the mark and incident `no-logprobs`
a log probability is a number, and not above 0      the same
==================================================  ==========================================================================

What no figure shows: an id in place of another of the vocabulary, as many ids lost as doubled, events in another order if their parts stay
together, an index that names another requested choice. vLLM numbers its events only with `continuous_usage_stats`. The proxy does not
request that, because with a reasoning parser vLLM (0.32, `chat_completion/serving.py`) then counts all tokens of a reply again for each
event. A reply that was broken off has no final `usage`, so its number of ids is not checked.
"""

import math
from array import array
from collections.abc import Mapping
from operator import attrgetter

import msgspec

from tokencache.core.ids import ABOVE_ALL_IDS
from tokencache.core.incidents import IncidentKind
from tokencache.engine.prompt_echo import highest_of, read_ids
from tokencache.engine.reply import Choice, Reply

_ROUNDING = 1e-4
"""A log probability may be this far above 0: `logits - max - log(sum)` is computed with float32 values."""


class Finding(msgspec.Struct, frozen=True):
    """What the figures of one choice prove.

    Attributes:
        tokens: the number of ids, from the first one, that are certain.
        hole: the kind of the hole if these are not all ids; otherwise `None`.
        detail: what is wrong, in words.
        no_logprobs: why the log probabilities cannot be trained, in words; `""` if they can.
    """

    tokens: int
    hole: IncidentKind | None = None
    detail: str = ""
    no_logprobs: str = ""


class Judgement(msgspec.Struct, frozen=True):
    """What the figures of a reply prove.

    Attributes:
        found: the same for each choice.
        wrong_prompt: why the reported prompts are not certain, in words; `""` if they are.
        uncertain: whether ids of the reply are in doubt.
        whole: whether the reply is complete, and all its ids are certain.
    """

    found: Mapping[int, Finding]
    wrong_prompt: str
    uncertain: bool
    whole: bool


def judge_reply(reply: Reply, *, broken_off: bool = False) -> Judgement:
    """Judge a reply that has ended; `broken_off` is whether its end is missing although it may look complete."""
    if reply.count_proves and not reply.prompt.known and reply.prompt_counted == reply.prompt.sent.tokens:
        reply.prompt.confirm()
    complete = not (broken_off or reply.error or reply.unreadable)
    found, wrong = judge(reply, whole=complete), wrong_prompt(reply)
    uncertain = bool(wrong) or any(map(attrgetter("hole"), found.values()))
    return Judgement(found, wrong, uncertain, complete and not uncertain)


def judge(reply: Reply, *, whole: bool = False) -> dict[int, Finding]:
    """Judge all choices of a reply, as far as it arrived; `whole` is whether it is complete, so that its usage must be there."""
    choices = reply.choices
    wrong = _wrong_as_a_whole(reply, choices)
    if whole and reply.must_count and reply.counted is None and None in map(attrgetter("counted"), choices.values()):
        wrong = wrong or "the engine did not count its tokens"
    return {index: _judge(choice, reply, wrong) for index, choice in choices.items()}


def certain_choices(reply: Reply) -> dict[int, Choice]:
    """Return the choices of a complete reply whose ids and log probabilities are all certain, by their index."""
    if wrong_prompt(reply):
        return {}
    found = judge(reply, whole=True)
    return {index: choice for index, choice in reply.choices.items() if found[index].hole is None and not found[index].no_logprobs}


def wrong_prompt(reply: Reply) -> str:
    """Return why the reported prompts of a reply are not certain, in words; `""` if they are."""
    if any(map(attrgetter("prompt"), reply.choices.values())):
        return _wrong_prompts([choice.prompt for _, choice in sorted(reply.choices.items())], reply)
    if reply.prompt.agreed or reply.prompt.packed is None:
        return ""
    counted = reply.prompt_counted
    if counted is not None and counted != reply.prompt.tokens:
        return f"the engine counts {counted} prompt tokens, and reported {reply.prompt.tokens} ids"
    limit = reply.prompt.limit
    return _above(reply.prompt.highest, limit) if limit else ""


def _above(highest: int, limit: int) -> str:
    """Return that a prompt has ids that the model does not have, in words; `""` if it has none."""
    return f"the prompt has the id {highest}, of {limit} that are possible" if highest >= limit else ""


def _wrong_prompts(own: list[bytes], reply: Reply) -> str:
    """As `wrong_prompt`, for a text completion: the choices of one prompt follow each other, and each has the ids of the prompt."""
    if not all(own):
        return "not all choices have the ids of their prompt"
    if limit := reply.prompt.limit:
        highest = max(highest_of(read_ids(prompt) or b"") for prompt in {*own})
        if above := _above(highest, limit):
            return above
    if not reply.prompt_counted or len(own) != reply.expected:
        return ""
    tokens = sum(prompt.count(b",") + 1 for prompt in own)
    each, rest = divmod(tokens, reply.prompt_counted)
    if rest or not each or any(own[n] != own[n - n % each] for n in range(len(own))):
        return f"the engine counts {reply.prompt_counted} prompt tokens, and reported {tokens} ids with its {len(own)} choices"
    return ""


def _wrong_as_a_whole(reply: Reply, choices: Mapping[int, Choice]) -> str:
    """Return why no id of a reply is certain, in words."""
    if choices and not 0 <= min(choices) <= max(choices) < reply.expected:
        return f"it has a choice {min(choices) if min(choices) < 0 else max(choices)}, and {reply.expected} were requested"
    if reply.counted is not None and reply.counted != (sampled := sum(choice.sampled for choice in choices.values())):
        return f"the engine counts {reply.counted} tokens, and reported {sampled} ids"
    return ""


def _judge(choice: Choice, reply: Reply, wrong: str) -> Finding:
    sampled, limit = choice.ids, reply.vocabulary or ABOVE_ALL_IDS
    if not sampled and (choice.has_words or choice.logprobs or (choice.ended_by_a_token and 0 not in {reply.counted, choice.counted})):
        return Finding(0, IncidentKind.NO_TOKEN_IDS, "the engine did not report the ids of the reply")
    if sampled and max(array("I", sampled.tobytes()).tolist()) >= limit:  # one pass: as an unsigned number, an id below 0 is above all
        return Finding(0, IncidentKind.INCONSISTENT_REPLY, f"ids from {min(sampled)} to {max(sampled)}, of {limit} that are possible")
    certain, hole, detail = len(sampled), None, ""
    if choice.certain is not None:
        certain, detail = choice.certain, choice.doubt
        hole = IncidentKind.INCONSISTENT_REPLY if detail else IncidentKind.UNREADABLE_REPLY
    elif wrong:
        certain, hole, detail = len(sampled) - choice.sampled, IncidentKind.INCONSISTENT_REPLY, wrong
    elif reply.counted is None and choice.counted not in {None, choice.sampled}:
        certain, hole = len(sampled) - choice.sampled, IncidentKind.INCONSISTENT_REPLY
        detail = f"the engine last counted {choice.counted} tokens, and reported {choice.sampled} ids"
    return Finding(certain, hole, detail, _wrong_logprobs(choice, certain))


def _wrong_logprobs(choice: Choice, certain: int) -> str:
    values = choice.logprobs[:certain]
    if len(choice.logprobs) != len(choice.ids) or not choice.aligned:
        return f"{len(choice.logprobs)} log probabilities for {len(choice.ids)} tokens" if certain else ""
    if not math.isfinite(sum(values)):
        return "a log probability is not a number"
    return f"a log probability is {max(values):.6g}" if values and max(values) > _ROUNDING else ""
