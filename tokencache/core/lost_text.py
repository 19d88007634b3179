"""Finds what the model sampled and its client never received: text that a parser of the engine dropped.

The decoded ids of a reply are compared with the message that was served. Each part of the message (reasoning, text, names and arguments of
calls) is located in the decoded text and crossed out. What remains is the markup around the parts, and what was lost. The model's own
template tells them apart: it writes a sample reply (`SAMPLE`), and each word that it adds is a word of the markup (`Markup`).

Nothing is claimed unless the whole message was located. White space, punctuation and words of the markup never count as lost. The number of
lost characters does not depend on the places that are chosen; which of two equal texts is the lost one does.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from tokencache.core.messages import Message, ToolCall

_USER, _TEXT, _THOUGHT, _ID = "qsampleuser", "qsampletext", "qsamplethought", "q7sampl3q"
_NAME, _KEY, _VALUE = "qsamplename", "qkey", "qvalue"
_CALLS = [{"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})}}]
_REPLY: dict[str, Any] = {"role": "assistant", "reasoning": _THOUGHT, "content": _TEXT}
SAMPLE: list[dict[str, Any]] = [{"role": "user", "content": _USER}, {**_REPLY, "tool_calls": _CALLS}]
"""The conversation whose rendering shows the markup. Mistral's templates require ids of nine letters and digits."""
SAMPLE_WITHOUT_CALLS: list[dict[str, Any]] = [SAMPLE[0], _REPLY]
"""The same for a template that refuses calls."""

_MOST_PIECES = 64
"""Pieces in which a part may occur in the decoded text, because a parser joined them."""
_WORD = re.compile(r"\w+")
_MARKS = frozenset('<>{}[]()"|=')
_AFTER = re.compile(r'[\w<>{}\[\]()"|=].*', re.DOTALL)
"""In the markup before and after lost words: what belongs to them, and from where on it does not."""
_UNCROSSED = re.compile("[^\0]+")
_LEAF = re.compile(r'"((?:[^"\\]|\\.)*+)(?:"|\\?\Z)|(-?\d[\d.eE+-]*)|(true|false|null)', re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS = {"true": ("true", "True"), "false": ("false", "False"), "null": ("null", "None")}
Span = tuple[int, int]


class LostText(msgspec.Struct, frozen=True):
    """What a turn sampled and its client never received.

    Attributes:
        texts: the lost texts, in order. `unknown`: why the turn was not compared; `""` if it was.
    """

    texts: tuple[str, ...] = ()
    unknown: str = ""


class Markup(NamedTuple):
    """What a template writes around the parts of a reply.

    Attributes:
        words: the words that it adds.
        thought_end: what it puts after the reasoning; `</think>` if it shows none.
        calls: whether it shows how calls are written, without an id that the model itself writes.
    """

    words: frozenset[str]
    thought_end: str
    calls: bool


def markup_of(rendering: str) -> Markup:
    """Read the markup from the rendering of `SAMPLE`, or of `SAMPLE_WITHOUT_CALLS`."""
    reply = rendering.rpartition(_USER)[2]
    bare = reply
    for own in (_TEXT, _THOUGHT, _NAME, _KEY, _VALUE, _ID):
        bare = bare.replace(own, " ")
    words = set(_WORD.findall(bare))
    after = reply.partition(_THOUGHT)[2].partition(_TEXT)[0].split()
    shown = all(name in reply for name in (_NAME, _KEY, _VALUE)) and _ID not in reply
    return Markup(frozenset(words), next(iter(after), "</think>"), shown)


def find_lost_text(sampled: str, served: Message, markup: Markup) -> LostText:
    """Compare the decoded ids of a reply with the message that was served.

    ================  =================================================================================
    `other-text`      a part of the message is not in the decoded text, or not in this order
    `unknown-markup`  the template does not show how this model writes calls
    ================  =================================================================================

    Args:
        sampled: the decoded ids, special tokens included, without the stop id and without a stop string.
        served: the message, without a beginning that the client sent.
        markup: the markup of the model.
    """
    if served.calls and not markup.calls:
        return LostText(unknown="unknown-markup")
    text = _Text(sampled)
    if not served.thought and markup.thought_end in sampled:  # the request may hide it
        text.cross_out([(0, sampled.index(markup.thought_end))])
    parts = [part for part in (served.reasoning or "", served.content or "") if part.strip()]
    joined = [part for part in parts if not text.cross_out_whole(part.strip())]
    at = 0
    for call in served.calls:
        spans = text.spans_of_call(call, at)
        if spans is None:
            return LostText(unknown="other-text")
        text.cross_out(spans)
        at = spans[-1][1]
    if not all(map(text.cross_out_pieces, joined)):
        return LostText(unknown="other-text")
    return LostText(tuple(text.left(markup.words)))


class _Text:
    """A decoded text, in which NUL characters replace what was delivered."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\0", " ")

    def cross_out(self, spans: Iterable[Span]) -> None:
        for start, end in spans:
            self._text = self._text[:start] + "\0" * (end - start) + self._text[end:]

    def cross_out_whole(self, part: str) -> bool:
        """Cross out a part that occurs as it is."""
        at = self._find(part, 0)
        if at >= 0:
            self.cross_out([(at, at + len(part))])
        return at >= 0

    def cross_out_pieces(self, part: str) -> bool:
        """Cross out a part that occurs in pieces, in order. Returns whether all of it does."""
        at, rest = 0, part.strip()
        for _ in range(_MOST_PIECES):
            if not rest:
                return True
            piece = self._longest(rest, at)
            found = self._find(piece, at) if piece else -1
            if found < 0:
                return False
            at = found + len(piece)
            self.cross_out([(found, at)])
            rest = rest[len(piece) :].lstrip()
        return not rest

    def spans_of_call(self, call: ToolCall, at: int) -> list[Span] | None:
        """Locate the name of a call and what its arguments contain, in order; `None` if one of them is not there."""
        first = self._find(call.name, at) if call.name else -1
        if first < 0:
            return None
        spans: list[Span] = []
        end = first + len(call.name)
        whole = self._find(call.arguments, end)
        if whole >= 0:
            spans.append((whole, whole + len(call.arguments)))
        else:
            for leaf in _LEAF.finditer(call.arguments):
                span = self._span_of_leaf(leaf, end)
                if span is None:
                    return None
                spans.append(span)
                end = span[1]
        name = self._last(call.name, first, spans[0][0]) if spans else first
        return [(name, name + len(call.name)), *spans]

    def left(self, markup: frozenset[str]) -> Iterator[str]:
        """Return what is not crossed out, without the markup around it."""
        for run in _UNCROSSED.finditer(self._text):
            words = [word.span() for word in _WORD.finditer(run[0]) if word[0] not in markup]
            if words:
                before, after = run[0][: words[0][0]], run[0][words[-1][1] :]
                opening, closing = _opening(before), _AFTER.sub("", after)
                yield (opening + run[0][words[0][0] : words[-1][1]] + closing).strip()

    def _find(self, part: str, at: int) -> int:
        """Return the first place of a part that begins and ends no word in the middle; -1 if there is none."""
        found = self._text.find(part, at)
        while found >= 0 and not self._whole_words(found, part):
            found = self._text.find(part, found + 1)
        return found

    def _last(self, part: str, first: int, before: int) -> int:
        found = self._text.rfind(part, first, before)
        while found > first and not self._whole_words(found, part):
            found = self._text.rfind(part, first, found + len(part) - 1)
        return found

    def _whole_words(self, at: int, part: str) -> bool:
        around = self._text[at - 1 : at] + part[0], part[-1] + self._text[at + len(part) : at + len(part) + 1]
        return not any(len(pair) == 2 and _WORD.fullmatch(pair) for pair in around)  # noqa: PLR2004 - the characters of a pair

    def _longest(self, part: str, at: int) -> str:
        """Return the longest beginning of a part that occurs and ends with a word, or all of it."""
        low, high = 0, len(part)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._text.find(part[:middle], at) >= 0 else (low, middle - 1)
        while 0 < low < len(part) and _WORD.fullmatch(part[low - 1 : low + 1]):
            low -= 1
        return part[:low].rstrip()

    def _span_of_leaf(self, leaf: re.Match[str], at: int) -> Span | None:
        """Locate a string, a number or a constant of the arguments, in any of the forms in which models write it."""
        written, number, constant = leaf.groups()
        if number is not None:
            return self._span_of_number(number, at)
        forms = _CONSTANTS[constant] if constant is not None else _forms(written)
        if not any(forms):
            return at, at
        found = [(place, place + len(form)) for form in forms if (place := self._find(form, at)) >= 0]
        return min(found, default=None)

    def _span_of_number(self, number: str, at: int) -> Span | None:
        found = _NUMBER.search(self._text, at)
        while found is not None:
            if float(found[0]) == _value(number):
                return found.span()
            found = _NUMBER.search(self._text, found.end())
        return None


def _forms(written: str) -> set[str]:
    """Return the forms of a JSON string that a model may have sampled: as JSON, with or without escapes, and as plain text."""
    try:
        plain = json.loads(f'"{written}"', strict=False)
    except ValueError:  # cut within an escape
        plain = written
    forms = {written, plain, json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1], repr(plain)[1:-1]}
    return {form.strip() for form in forms}


def _value(number: str) -> float | None:
    try:
        return float(number)
    except ValueError:
        return None


def _opening(before: str) -> str:
    """Return the end of a text that belongs to the word after it: opening brackets, or characters that are no markup."""
    bare = before.rstrip("<[({")
    if bare != before:
        return before[len(bare) :]
    end = len(before)
    while end and before[end - 1] not in _MARKS and not _WORD.match(before[end - 1]):
        end -= 1
    return before[end:]
