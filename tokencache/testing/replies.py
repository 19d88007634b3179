r"""Makes the replies of the simulated model: their text, and the token ids that spell it.

The text of a reply comes from one of three sources. An *episode* is a list of replies that a test defines: a prompt that contains
`EPISODE:name` gets reply number k, where k is the number of assistant turns in the prompt. The last reply is repeated. Only the prompt
selects the reply, so retries, forks and parallel sub-agents work as with a real model. Without an episode the model makes up short random
text, with and without thinking and tool calls. A *script* precedes both: a function that gets each request and may return any text
(tests that replay recorded traffic recognize requests by their id).

A prompt may end with the beginning of a reply. Then the model samples the rest of that reply, in any ids, even if the beginning ends
within a character.

The ids are then sampled as by a model, not chosen as by the tokenizer. The generator is seeded with the prompt and a call counter. So the
same request gives the same text in different ids each time, and a whole test run gives the same ids every time, if its calls come in the
same order or name a `seed`.

vLLM's qwen3 parser reads a reply without `</think>` as reasoning only (see `parser`). So an episode must end its thinking, with
`<think>\n…\n</think>\n\n` at the beginning, or turn it off with `chat_template_kwargs: {"enable_thinking": false}`.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokencache.testing.chat_request import ChatRequest
from tokencache.testing.parser import reasoning_is_over
from tokencache.testing.tokenizer import SimTokenizer

_EPISODE = re.compile(r"EPISODE:([A-Za-z0-9_-]+)")
_OPENER = "<|im_start|>assistant\n"
_SENTENCES = (
    "The file is where I expected it, so the next step is easy.",
    "That did not work: the command returned an error, and I will look at the log.",
    "Everything is in place now. The tests pass — shall I go on?",
    "I changed the function so that it returns the value instead of printing it.",
    "Naïve as it sounds, a café in Zürich explains it ☕.",
)
_THOUGHTS = (
    "I should look at the directory before I change anything.",
    "The user wants a short answer.",
    "The error message says that the argument is missing; let me check the call.",
)
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_CONTINUES = range(0x80, 0xC0)
"""Bytes of a character after its first (UTF-8)."""
_PLAIN_VALUES: dict[str, Sequence[Any]] = {"integer": range(5001), "number": (1.5, 2, 0.25), "boolean": (True, False)}
_WORDS = ("src/main.py", "ls -la", "README.md", "weather in Paris", 'grep -n "def" *.py', "naïve", "")


@dataclass(slots=True)
class ReplyGenerator:
    """Makes the replies of one engine.

    Attributes:
        episodes: replies by name.
        seed: seed of all random choices.
        drift: probability that a token is split into two. 0 makes every reply canonical.
        eos: the id at which the engine stops by itself. A base model's is not the template's end of turn: it samples both.
        script: returns the text of the reply to a request, or `None`. The text is an iterable of pieces, possibly infinite. No token
            crosses the border of a piece.
        repeatable: whether the same prompt always gets the same ids and log probabilities. Otherwise each call gets others.
    """

    tokenizer: SimTokenizer
    episodes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seed: int = 0
    drift: float = 0.3
    script: Callable[[ChatRequest], Iterable[str] | None] | None = None
    eos: int = -1
    repeatable: bool = False

    def __post_init__(self) -> None:
        """Stop at the template's end of turn, unless another id is set."""
        self.eos = self.tokenizer.stop_id if self.eos < 0 else self.eos

    def logprobs_seed(self, prompt_ids: Sequence[int], call: int, index: int) -> str:
        """Return the seed of the log probabilities of a reply; the arguments are those of `reply`."""
        return f"{self.seed}:{hash(tuple(prompt_ids)) if self.repeatable else call}:{index}"

    def reply(self, request: ChatRequest, prompt_ids: Sequence[int], call: int, index: int, choice: Sequence[str] = ()) -> Iterator[int]:
        """Yield the ids of one reply. The caller may stop at any id.

        It ends after the end-of-turn id. If the request allows only certain ids, or ignores the end, it may be infinite. `call` is the
        engine's count of generations, `index` the number of the choice. A grammar binds the reply to one of the texts of `choice`.
        """
        chosen = 0 if self.repeatable else request.body.get("seed")  # with a seed in the request, the same prompt always gets the same ids
        rng = random.Random(f"{self.seed}:{call if chosen is None else chosen}:{index}:{','.join(map(str, prompt_ids))}")
        if request.allowed_token_ids is not None:
            likeliest = self._likeliest(request, request.allowed_token_ids, choice)
            while True:
                yield (token_id := rng.choice(likeliest))
                if token_id == self.eos and not request.ignore_eos:
                    return
        scripted = self.script(request) if self.script is not None else None
        if choice:
            yield from self.tokenizer.resample(choice[0], rng, self.drift)
        elif scripted is not None:
            for piece in scripted:
                yield from self.tokenizer.resample(piece, rng, self.drift)
        else:
            yield from self._rest(request, prompt_ids, rng)
        yield self.tokenizer.stop_id
        while request.ignore_eos or self.eos != self.tokenizer.stop_id:
            yield self.eos

    def _likeliest(self, request: ChatRequest, allowed: Sequence[int], choice: Sequence[str]) -> Sequence[int]:
        """Return the allowed ids that begin one of the texts, if there are any, and of these the ones with the largest bias."""
        biases = {int(token_id): bias for token_id, bias in (request.body.get("logit_bias") or {}).items()}
        within = [token_id for token_id in allowed if not choice or any(text.startswith(self.tokenizer.token(token_id)) for text in choice)]
        most = max((biases.get(token_id, 0) for token_id in within), default=0)
        return [token_id for token_id in within if biases.get(token_id, 0) == most] or allowed

    def _rest(self, request: ChatRequest, prompt_ids: Sequence[int], rng: random.Random) -> Iterator[int]:
        """Yield the ids of a reply, without the beginning of it that the prompt has already."""
        for opened in self._ends_of_opener(prompt_ids):
            begun = b"".join(self.tokenizer.token_bytes(token_id) for token_id in prompt_ids[opened:])
            text = self._text(request, prompt_ids[:opened])
            if text.encode().startswith(begun):
                break
        else:
            text, begun = self._text(request, prompt_ids), b""
        rest, split = text.encode()[len(begun) :], 0
        while split < len(rest) and rest[split] in _CONTINUES:  # the rest of a character
            split += 1
        yield from self.tokenizer.spell(rest[:split])
        yield from self.tokenizer.resample(rest[split:].decode(), rng, self.drift)

    def _ends_of_opener(self, prompt_ids: Sequence[int]) -> Iterator[int]:
        """Yield where the last reply of a prompt may begin: after its opener, and first after an empty thinking block, if there is one.

        Either the template or the reply itself may have begun with that block.
        """
        opener, empty = self.tokenizer.opener_ids, tuple(self.tokenizer.encode(_NO_THOUGHT))
        for at in range(len(prompt_ids) - len(opener), -1, -1):
            if tuple(prompt_ids[at : at + len(opener)]) == opener:
                end = at + len(opener)
                if tuple(prompt_ids[end : end + len(empty)]) == empty:
                    yield end + len(empty)
                yield end
                return
        yield len(prompt_ids)

    def _text(self, request: ChatRequest, prompt_ids: Sequence[int]) -> str:
        prompt = self.tokenizer.decode(prompt_ids)
        named = _EPISODE.search(prompt)
        turns = self.episodes.get(named[1]) if named else None
        if turns:
            return turns[min(max(prompt.count(_OPENER), 1), len(turns)) - 1]
        thinks = not reasoning_is_over(prompt_ids, self.tokenizer, thinking=request.thinking)
        return self._free(random.Random(f"{self.seed}:{prompt}"), request, thinks=thinks)

    def _free(self, rng: random.Random, request: ChatRequest, *, thinks: bool) -> str:
        """Make up a reply. The text depends only on the prompt."""
        thought = rng.choice(("", *_THOUGHTS))
        text = f"<think>\n{thought}\n</think>\n\n" if thinks else ""
        choice = request.body.get("tool_choice")
        forced = isinstance(choice, dict) or choice == "required"
        if not request.parse_tools or (not forced and rng.random() < 0.5):  # noqa: PLR2004 - half of the replies call a tool
            return text + " ".join(rng.sample(_SENTENCES, rng.randint(1, 2)))
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        tools = [tool["function"] for tool in request.tools if named in (None, tool["function"]["name"])]
        calls = [_call(rng, rng.choice(tools)) for _ in range(rng.randint(1, 2 if request.parallel_tool_calls else 1))]
        intro = f"{rng.choice(_SENTENCES)}\n" if rng.random() < 0.5 else ""  # noqa: PLR2004
        return text + intro + "\n".join(calls)


def _call(rng: random.Random, function: Mapping[str, Any]) -> str:
    """Write a call of a tool, with arguments that fit its schema."""
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    chosen = {
        name: _value(rng, rule if isinstance(rule, dict) else {})
        for name, rule in (schema.get("properties") or {}).items()
        if name in required or rng.random() < 0.5  # noqa: PLR2004
    }
    call = json.dumps({"name": function["name"], "arguments": chosen}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _value(rng: random.Random, rule: Mapping[str, Any]) -> Any:
    if rule.get("enum"):
        return rng.choice(rule["enum"])
    kind = rule.get("type")
    if kind == "array":
        return [_value(rng, rule.get("items") or {}) for _ in range(rng.randint(0, 2))]
    if kind == "object":
        return {name: _value(rng, inner) for name, inner in (rule.get("properties") or {}).items()}
    return rng.choice(_PLAIN_VALUES.get(str(kind), _WORDS))
