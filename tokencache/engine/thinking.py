"""Tests with which ids an engine ends a thought whose budget is used up (`thinking_token_budget`), and which ids begin one.

No answer of vLLM names them: they follow from `--reasoning-parser` and `--reasoning-config` (0.32, `config/reasoning.py`). So the proxy
lets the engine force them. It sends an exact prompt that ends with the openers of all known parsers, one after another, a budget, and a
mask that allows a single id (`allowed_token_ids`). Whatever else the reply holds was forced, because vLLM forces after it masks. Two
requests with different masks show it: an id that both replies have in the same place was in one mask at most. The place says how many
tokens were counted, and so which opener began the thought.

If an engine forces nothing, or if the place fits no opener, the ids are not known, and so it is not known which ids of a reply were forced.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from tokencache.core import ids
from tokencache.core.forced import ThinkingMarks
from tokencache.dialects.chat.sampling import BUDGET
from tokencache.engine.reply import Reply
from tokencache.engine.template.renderer import EngineRenderer
from tokencache.engine.upstream import AskChat

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|channel>", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<ifm|think>", "</ifm|think>"),
)
"""What begins and ends a thought, by the reasoning parsers of vLLM 0.32 (`vllm/reasoning`, `vllm/parser`)."""
_LONGEST_FORCED = 64
"""Ids that an engine may force: `--reasoning-config` may put a sentence before the end of a thought."""


async def find_thinking_marks(
    ask: AskChat, renderer: EngineRenderer, model: str, plain: bytes, supply: Callable[[list[int]], dict[str, Any]]
) -> ThinkingMarks | None:
    """Find the ids around a thought; `None` if they cannot be proven.

    Args:
        ask: sends a chat request.
        renderer: tokenizes the openers.
        model: the model's name.
        plain: packed ids of any prompt.
        supply: returns the members of a chat request whose prompt has the given ids.

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    openers = [await renderer.encode(model, opener) for opener, _ in MARKS]
    ends = [sum(map(len, openers[: n + 1])) for n in range(len(openers))]
    added = [token for opener in openers for token in opener]
    masks = sorted(set(ids.unpack(plain)) - set(added))
    if len(masks) < 2 or not all(openers):  # noqa: PLR2004 - two masks
        return None
    body = {"model": model, **supply([*ids.unpack(plain), *added]), BUDGET: len(added) + 1, "ignore_eos": True, "return_token_ids": True}
    body["max_tokens"] = length = len(added) + 2 + _LONGEST_FORCED
    prompt = plain + ids.pack(added)
    one, other = [await _sampled(ask, {**body, "allowed_token_ids": [mask]}, prompt) for mask in (masks[0], masks[-1])]
    forced = [place for place, both in enumerate(zip(one, other, strict=False)) if both[0] == both[1]]
    if not forced or len(one) != length or len(other) != length or forced[-1] - forced[0] + 1 != len(forced) or forced[-1] == length - 1:
        return None
    free = set(range(length)) - set(forced)
    if any((one[place], other[place]) != (masks[0], masks[-1]) for place in free) or forced[0] - 1 not in ends:
        return None
    opener = ends.index(forced[0] - 1)
    closer = await renderer.encode(model, MARKS[opener][1])
    return ThinkingMarks(ids.pack(openers[opener]), ids.pack(closer), ids.pack(one[forced[0] : forced[-1] + 1])) if closer else None


async def _sampled(ask: AskChat, body: Mapping[str, Any], prompt: bytes) -> list[int]:
    """Return the ids of the reply to a request with this exact prompt; none if the engine refuses it or used another prompt."""
    answer = await ask(body)
    reply = Reply()
    if answer.status == HTTPStatus.OK:
        reply.add(answer.body)
    return list(reply.choices[0].ids) if 0 in reply.choices and reply.prompt.packed == prompt else []
