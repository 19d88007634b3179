"""Counts the steps that a backtracking search of a regular expression takes, and makes the texts on which it takes the most.

`re` does not say how many steps it takes, and time depends on the machine. So `Steps` is a matcher of its own: it reads the same parsed
expression as `re` (`re._parser`) and tries the same alternatives in the same order. Its matches equal those of `re`
(`test_regex_steps.py`). `re` may skip places where no match can begin, and is then faster, but never slower.
"""

import re
from collections.abc import Iterator
from typing import Any

from re import _compiler, _constants as op, _parser  # isort: skip

KINDS = (
    *(" ", "\t", "\n", "a", "Z", "0", "-", "_", ".", "/", '"', "'", "\\", "\\u", "{", "[", ",", ":", "é"),
    *('{"a":', "[1,", "<think>", "</think>", "<tool_call>", "<|x|>", "sk-a", "cd a && "),
)
"""27 texts that a degenerate model or a hostile harness may repeat."""
ENDS = ("", "\0", "-", "\n!")
"""Texts after the repetition, at which a match may fail."""
_CANDIDATES = "a1 -_<>\"'\\/{}[]:,.|\n\tAZf@#$%&*()?=+\0é"
_SPECIAL, _MOST_SPECIAL = "\"'\\<>{}: -&", 5
_CHARACTERS = {op.LITERAL, op.NOT_LITERAL, op.IN, op.ANY}
_REPEATS = {op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT}
_ENDLESS = 100
"""A repetition of more than this counts as endless."""


class TooManyStepsError(Exception):
    """A search took more steps than it may."""


class Steps:
    """A backtracking matcher of one expression. `taken` is the number of its steps so far; with more than `most` it raises an error."""

    def __init__(self, pattern: "re.Pattern[Any]") -> None:
        self.taken, self.most = 0, float("inf")
        self._written = written = pattern.pattern
        self._bytes = isinstance(written, bytes)
        self._flags = pattern.flags
        self._tree = _parser.parse(written, pattern.flags)
        self._known: dict[tuple[int, str], bool] = {}
        self._single: dict[int, re.Pattern[Any]] = {}
        self._text = ""
        self._groups: dict[int, str] = {}

    def fullmatch(self, text: str) -> int | None:
        """Match the whole text; returns where the match ends."""
        return next((end for end in self._matches(text, 0) if end == len(text)), None)

    def match(self, text: str, at: int = 0) -> int | None:
        """Match at one place; returns where the match ends."""
        return next(self._matches(text, at), None)

    def search(self, text: str) -> list[tuple[int, int]]:
        """Find all matches, as `finditer` and `sub` do; returns where they begin and end."""
        found, at = [], 0
        while at <= len(text):
            self.taken += 1
            end = self.match(text, at)
            if end is None:
                at += 1
                continue
            found.append((at, end))
            at = max(end, at + 1)
        return found

    def _matches(self, text: str, at: int) -> Iterator[int]:
        self._text, self._groups = text, {}
        return self._sequence(self._tree.data, 0, at)

    def _sequence(self, nodes: list[Any], place: int, at: int) -> Iterator[int]:
        while place < len(nodes) and nodes[place][0] in _CHARACTERS:  # the usual case, without a generator
            if not self._takes(nodes[place], at):
                return
            place, at = place + 1, at + 1
        if place == len(nodes):
            yield at
            return
        for end in self._node(nodes[place], at):
            yield from self._sequence(nodes, place + 1, end)

    def _step(self) -> None:
        self.taken += 1
        if self.taken > self.most:
            raise TooManyStepsError

    def _takes(self, node: Any, at: int) -> bool:
        """Whether a node for one character accepts the next one: a step."""
        self._step()
        return at < len(self._text) and self.accepts(node, self._text[at])

    def _node(self, node: Any, at: int) -> Iterator[int]:  # noqa: C901, PLR0912 - a branch for each kind of node
        self._step()
        kind, argument = node
        if kind is op.BRANCH:
            for alternative in argument[1]:
                yield from self._sequence(alternative.data, 0, at)
        elif kind is op.SUBPATTERN:
            for end in self._sequence(argument[3].data, 0, at):
                self._groups[argument[0]] = self._text[at:end]
                yield end
        elif kind is op.ATOMIC_GROUP:
            yield from _first(self._sequence(argument.data, 0, at))
        elif kind is op.POSSESSIVE_REPEAT:
            yield from _first(self._repeat(argument, at, greedy=True))
        elif kind in _REPEATS:
            yield from self._repeat(argument, at, greedy=kind is op.MAX_REPEAT)
        elif kind is op.GROUPREF:
            group = self._groups.get(argument, "\0\0")
            self.taken += len(group)
            if self._text.startswith(group, at):
                yield at + len(group)
        elif kind in {op.ASSERT, op.ASSERT_NOT}:
            direction, inner = argument
            begin = at if direction > 0 else at - inner.getwidth()[0]
            held = begin >= 0 and any(direction > 0 or end == at for end in self._sequence(inner.data, 0, begin))
            if held is (kind is op.ASSERT):
                yield at
        elif kind is op.AT:
            if self._stands(argument, at):
                yield at
        else:
            raise NotImplementedError(kind)

    def _repeat(self, argument: Any, at: int, *, greedy: bool) -> Iterator[int]:
        low, high, body = argument
        nodes = body.data
        if len(nodes) > 1 or nodes[0][0] not in _CHARACTERS:
            yield from self._repeat_group(nodes, low, high, at, greedy=greedy)
            return
        most = at
        while greedy and most - at < high and self._takes(nodes[0], most):
            most += 1
        if greedy:
            for end in range(most, at + low - 1, -1):
                self.taken += 1
                yield end
            return
        end = at
        while end - at <= high:
            self.taken += 1
            if end - at >= low:
                yield end
            if not self._takes(nodes[0], end):
                return
            end += 1

    def _repeat_group(self, nodes: list[Any], low: int, high: int, at: int, *, greedy: bool) -> Iterator[int]:
        if not greedy and low <= 0:
            yield at
        if high > 0:
            for end in self._sequence(nodes, 0, at):
                if end > at or low > 0:
                    yield from self._repeat_group(nodes, low - 1, high - 1, end, greedy=greedy)
        if greedy and low <= 0:
            yield at

    def accepts(self, node: Any, char: str) -> bool:
        """Whether a node for one character accepts it."""
        key = id(node[1]) if node[0] is op.IN else hash(node), char
        if key not in self._known:
            single = self._single.setdefault(key[0], _compiler.compile(_parser.SubPattern(self._tree.state, [node]), self._flags))
            self._known[key] = (
                ord(char) < 256 and single.match(char.encode("latin-1")) is not None if self._bytes else bool(single.match(char))
            )
        return self._known[key]

    def _stands(self, where: Any, at: int) -> bool:
        if where in {op.AT_BEGINNING, op.AT_BEGINNING_STRING}:
            return at == 0
        if where is op.AT_END_STRING:
            return at == len(self._text)
        if where is op.AT_END:
            return self._text[at:] in {"", "\n"}
        raise NotImplementedError(where)

    # Hostile texts.

    def pumped(self, n: int) -> Iterator[str]:
        """Yield texts with `n` repetitions.

        What the expression itself repeats, after what it wants before that; all pairs of its special characters; and all `KINDS`.
        """
        special = [char for char in dict.fromkeys(str(self._written)) if char in _SPECIAL][:_MOST_SPECIAL]
        units = {*self._pumps(list(self._tree), ""), *(("", a + b) for a in special for b in special), *(("", kind) for kind in KINDS)}
        for prefix, body in sorted(units):
            for end in ENDS:
                yield prefix + body * n + end
                if prefix:
                    yield (prefix + body) * n + end
                    yield prefix * n + end

    def _pumps(self, nodes: list[Any], prefix: str) -> Iterator[tuple[str, str]]:
        for node in nodes:
            kind, argument = node
            for inner in self._inner(node):
                yield from self._pumps(list(inner), prefix)
            if kind in _REPEATS and argument[1] > _ENDLESS:
                yield prefix, self._sample(list(argument[2])) or "a"
            prefix += self._sample([node])

    @staticmethod
    def _inner(node: Any) -> list[Any]:
        kind, argument = node
        if kind is op.BRANCH:
            return list(argument[1])
        if kind is op.SUBPATTERN:
            return [argument[3]]
        if kind is op.ATOMIC_GROUP:
            return [argument]
        return [argument[2]] if kind in _REPEATS else []

    def _sample(self, nodes: list[Any]) -> str:
        """Make a short text that matches."""
        made = ""
        for node in nodes:
            kind, argument = node
            if kind in _CHARACTERS:
                made += chr(argument) if kind is op.LITERAL else next((char for char in _CANDIDATES if self.accepts(node, char)), "a")
            elif kind in _REPEATS:
                made += self._sample(list(argument[2])) * max(argument[0], 1)
            elif inner := self._inner(node):
                made += self._sample(list(inner[0]))
        return made


def _first(found: Iterator[int]) -> Iterator[int]:
    end = next(found, None)
    if end is not None:
        yield end


def too_many_steps(pattern: "re.Pattern[Any]", how: str, n: int = 24) -> str:
    """Compare the steps of a method of `Steps` for `n` and 4`n` repetitions; returns the text that takes too many, `""` if none does."""
    steps = Steps(pattern)
    for short, long in zip(steps.pumped(n), steps.pumped(4 * n), strict=True):
        steps.most = 1000 * len(short)
        for text in (short, long):
            steps.taken = 0
            try:
                getattr(steps, how)(text)
            except TooManyStepsError:
                return f"more than {steps.most} steps for {text!r}"
            steps.most = 5 * steps.taken + _ENDLESS
    return ""
