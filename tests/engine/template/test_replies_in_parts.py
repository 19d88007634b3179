"""Where a template ends a call of several, and words of a harness in the message of a reply: found, or refused."""

import msgspec
import pytest

from tests.engine.template.shapes import ask, result, says, user
from tests.engine.template.template_lab import KINDS, Lab
from tokencache.core import ids
from tokencache.engine.template.calls import call_end
from tokencache.engine.template.learned import LearnedTemplate, TailRefusedError
from tokencache.engine.template.tails import Tails

ENDS_EACH_CALL = {"Qwen2.5", "Qwen3", "Qwen3-2507", "Qwen3.5 think", "Qwen3.5 nothink", "Nemotron-3", "GLM-4.5"}
REFUSED = {("GLM-4.5", 2), ("gpt-oss", 2), ("gpt-oss", 3)}
"""No stop id ends a text of GLM's unless a user's message follows; gpt-oss has a message for each channel."""
WORDS = "\nObservation: 18 °C, rain"


async def learned(kind):
    lab = Lab.of(kind)
    return lab, LearnedTemplate(lab, await lab.found_stops(kind.stops))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_the_text_that_ends_every_call(kind):
    _, template = await learned(kind)
    request = ask([user(), says("Look.", "bash"), result()], 2, 3, tools=True)
    assert await call_end(template, request) == ("</tool_call>" if kind.name in ENDS_EACH_CALL else "")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_the_tail_begins_with_the_words_that_follow_a_reply_in_its_message(kind):
    """In the whole rendering, the newline before them is one token with the bracket before it."""
    lab, template = await learned(kind)
    messages = [user(), {"role": "assistant", "content": f'Action Input: {{"q": 1}}{WORDS}'}, user("And?")]
    for until in (2, 3):
        request = msgspec.structs.replace(ask(messages, 2, until, tools=False), words=WORDS)
        if (kind.name, until) in REFUSED:
            with pytest.raises(TailRefusedError, match="tail-not-proven"):
                await Tails(template).tail(request)
            continue
        tail = lab.words.decode(ids.unpack(await Tails(template).tail(request)))
        assert lab.text(messages[:until], None, generation=True).endswith(tail)
        assert tail.startswith(WORDS)
