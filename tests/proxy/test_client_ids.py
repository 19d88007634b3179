"""Token ids from clients that are not recorded: what is proven equals the template's rendering, for every kind of template."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from tests.engine.template.more_kinds import ALL_KINDS
from tests.support.pairwise import some
from tests.system.adversary.stack import Stack
from tokencache.core import ids
from tokencache.core.messages import Message, ToolCall
from tokencache.core.splice import fill
from tokencache.engine.template.learned import TailRefusedError
from tokencache.proxy import client_ids
from tokencache.proxy.client_ids import _between, _same_words

TEXTS = ["Yes.", "Done.", "Let me look.", "naïve café ☕ — 你好", "First line.\n\nSecond line.", '{"a": [1, 2.50]}', "OK"]
ASKS = ["Go on.", "Why?", "Fix  it.\n", "Schreib ü 你好 🙂", "<|im_end|> said she"]
NEVER_PROVEN = {"gpt-oss", "Hunyuan-A13B"}
"""Templates that write a reply otherwise than it is sampled: with another end of turn, or behind another opener."""
MUTANTS = ("generation", "prompt", "words", "question", "older words", "older generation")


class UnprovenError(AssertionError):
    """A client's ids were used that are not these messages."""


async def rollout(stack, rng, turns):
    """Talk for some turns in a session; the history with its ids, as an agent of Gym's sends it back."""
    history = [{"role": "user", "content": rng.choice(ASKS)}]
    for _ in range(turns):
        reply = {"role": "assistant", "content": rng.choice(TEXTS)}
        called = await stack.call("before", json.dumps({"model": "m", "messages": history}).encode(), reply)
        message = json.loads(called.answer)["choices"][0]["message"]
        tokens = {
            "prompt_token_ids": called.prompt,
            "generation_token_ids": called.completion,
            "generation_log_probs": called.generation.logprobs,
        }
        history += [{"role": "assistant", "content": message["content"], **tokens}, {"role": "user", "content": rng.choice(ASKS)}]
    return history


def changed(history, how, rng, stack):
    """Change something that makes the ids those of other messages."""
    history = json.loads(json.dumps(history))
    replies = [message for message in history if message["role"] == "assistant"]
    message = replies[0] if how.startswith("older") else replies[-1]
    if how.endswith("words"):
        message["content"] += " And more."
    elif how == "question":
        history[0]["content"] = "Something else?"
    else:
        tokens = message["prompt_token_ids" if how == "prompt" else "generation_token_ids"]
        at = rng.randrange(max(1, len(tokens) - 1))
        tokens[at] = stack.renderer.encode("x")[0] if tokens[at] != stack.renderer.encode("x")[0] else stack.renderer.encode("y")[0]
        if how == "older generation":  # in what follows, too: a story that holds together, with other words
            for later in replies[1:]:
                later["prompt_token_ids"][len(message["prompt_token_ids"]) + at] = tokens[at]
    return history


_OPENING = re.compile(r"<think>.*?</think>|</?think>|<\|(?:START|END)_RESPONSE\|>|\s", re.DOTALL)
"""What a reply may have been sampled behind and a template does not write in a history, or writes otherwise; no text here spells it."""


def check(stack, called, history):
    """Hold a prompt against the ids that came back, and its text against the template's rendering of the same messages.

    Raises:
        UnprovenError: it does not begin with them, or it says something else.
    """
    last = next(message for message in reversed(history) if message["role"] == "assistant")
    whole = last["prompt_token_ids"] + last["generation_token_ids"]
    if called.prompt[: len(whole)] != whole:
        raise UnprovenError("the prompt does not begin with the client's ids")
    bare = [{"role": message["role"], "content": message["content"]} for message in history]
    if _OPENING.sub("", stack.renderer.words.decode(called.prompt)) != _OPENING.sub("", called.text(bare)):
        raise UnprovenError("the prompt says something else than these messages")


async def afterwards(stack, history):
    """Send a history to a session that recorded nothing of it."""
    called = await stack.call("after", json.dumps({"model": "m", "messages": history}).encode(), {"role": "assistant", "content": "Well."})
    await stack.forget("after")
    return called


async def played(template, seeds, mutants=()):
    """Play rollouts that lose their record; count what became of each, as it was (`""`) and with a change."""
    seen = Counter()
    for seed in seeds:
        rng, stack = random.Random(seed), Stack(template, seed=seed)
        history = await rollout(stack, rng, rng.choice([1, 2, 3]))
        for how in ("", *mutants):
            sent = changed(history, how, rng, stack) if how else history
            called = await afterwards(stack, sent)
            seen[how, called.plan.reason] += 1
            if called.plan.reason == "client-ids":
                check(stack, called, sent)
    return seen


@pytest.mark.parametrize("template", some(ALL_KINDS, 10))
async def test_proven_ids_are_the_ids_of_these_messages(template):
    seen = await played(template, range(4), MUTANTS)
    assert seen["", "client-ids"] == (0 if template in NEVER_PROVEN else 4)
    for how in ("prompt", "words", "question", "older words"):
        assert seen[how, "client-ids-unproven"] == 4, (how, seen)
    assert seen["generation", "client-ids"] < 4, "what changes in a reasoning that did not come back cannot be seen"


async def test_the_check_finds_a_proof_that_does_not_compare_the_words(monkeypatch):
    monkeypatch.setattr(client_ids, "_same_words", lambda *_: True)
    with pytest.raises(UnprovenError, match="says something else"):
        await played("Qwen2.5", range(4), MUTANTS)


async def test_the_check_finds_a_proof_that_trusts_the_clients_prompt(monkeypatch):
    def trusting(pieces, openers, replies, stop_ids):
        return fill([ids.pack(sent["prompt_token_ids"])[: -len(openers[0])], pieces[-1]], openers[-1:], replies[-1:], stop_ids)

    sent = {}
    monkeypatch.setattr(client_ids, "fill", trusting)
    rng, stack = random.Random(1), Stack("Qwen2.5", seed=1)
    history = changed(await rollout(stack, rng, 1), "prompt", rng, stack)
    sent.update(history[1])
    called = await afterwards(stack, history)
    assert called.plan.reason == "client-ids"
    with pytest.raises(UnprovenError, match="says something else"):
        check(stack, called, history)


CALLS = (ToolCall("a", "bash", '{"cmd": "ls", "n": 5}'),)


@pytest.mark.parametrize(
    ("sampled", "written", "message", "same"),
    [
        ("Yes.", "Yes.", Message("assistant", "Yes."), True),
        ("Yes.\n", " Yes.", Message("assistant", "Yes."), True),
        ("Yes.", "Yes!", Message("assistant", "Yes!"), False),
        ("<think>a</think>\n\nYes.", "Yes.", Message("assistant", "Yes."), True),
        ("<think>a</think>\n\nYes.", "Yes.", Message("assistant", "Yes.", "a"), True),
        ("<think>a</think>\n\nYes.", "Yes.", Message("assistant", "Yes.", "b"), False),
        ("<think>a</think>\n\nYes.", "<think>b</think>Yes.", Message("assistant", "Yes."), False),
        ("Yes.", "Yes.", Message("assistant", "Yes.", "never"), False),
        ("<think>\ncut", "", Message("assistant", None, "cut"), True),
        ("<think>\ncut", "", Message("assistant", None), False),
        ('<t>{"cmd":"ls","n":5.0}</t>', '<t>{"n": 5, "cmd": "ls"}</t>', Message("assistant", None, calls=CALLS), True),
        ('Ok\n<t>{"name": "bash", "arguments": {"cmd":"ls", "n":5}}</t>', 'Ok<t>{"name": "bash", "arguments": {"cmd": "ls", "n": 5}}</t>',
         Message("assistant", "Ok", calls=CALLS), True),
        ('<t>{"cmd":"ls","n":6}</t>', '<t>{"cmd": "ls", "n": 5}</t>', Message("assistant", None, calls=CALLS), False),
        ('<t>{"name": "rm", "arguments": {"cmd": "ls", "n": 5}}</t>', '<t>{"name": "bash", "arguments": {"cmd": "ls", "n": 5}}</t>',
         Message("assistant", None, calls=CALLS), False),
        ('{"a": 1}', '{"a":1}', Message("assistant", '{"a":1}'), False),
        ("{{{{{", "{{{{{", Message("assistant", "{{{{{", calls=CALLS), True),
    ],
)  # fmt: skip
def test_a_sampled_text_is_compared_with_its_message(sampled, written, message, same):
    assert _same_words(sampled, written, message) is same


def test_texts_between_the_pieces_of_a_rendering():
    assert _between("[a]one[b]two[c]", ["[a]", "[b]", "[c]"]) == ["one", "two"]
    for rendered in ("one[b]two[c]", "[a]one two[c]", "[a]one[b]two", "[a[c]"):
        with pytest.raises(TailRefusedError):
            _between(rendered, ["[a]", "[b]", "[c]"])
