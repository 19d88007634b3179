"""Compares three independent records: what harnesses received, the engine's own log, and the export.

Of these there must be

* nothing *lost*: a reply that a harness received whole is in a recorded turn, or its session is marked incomplete;
* nothing *false*: every recorded turn is what the log says was sampled, after the prompt in the log, with the log probabilities in the
  log, once; its prompt contains the text of its own call's history and of no other; a turn that continues another begins with that
  turn's tokens; and the export is consistent in itself (`trajectories.verify`);
* nothing *unmarked*: if the engine sampled something that no turn records, its session reports it as missing;
* nothing *unnamed*: the report names the call, so that no hole hides behind the mark of another;
* nothing *misjudged*: a session whose harness gave up on a failed call is not valid, and one whose harness received its last reply has the
  outcome `ok` if it is complete. What no replica saw, such as a call that died with its replica before it began, shows in no record.

A store may lose its memory (Redis without persistence). Then sessions are lost with their incidents: a session does not exist (`gone`), or
begins in the middle of a conversation and reports `unrecognised-reply` (`beheaded`). Both are counted separately, and allowed only if the
caller states that memory was lost.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from tokencache.testing import build_tokenizer
from tokencache.testing.parser import parse_reply
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.system.faults.harness import Asked
    from tokencache.testing import GroundTruthEntry, SimTokenizer

_MARK = re.compile(r"#([\w.-]+-\d+)#")
_CUT_SHORT = frozenset({"aborted", "upstream-broke", "engine-error", "engine-aborted", "uncertain"})
"""Marks of turns that may contain only the beginning of what was sampled."""
UNKNOWN = "unrecognised-reply"
_SEEN = re.compile(r"429|5\d\d|TimeoutError|LeftError")
"""How an attempt ends that a replica served, and that failed: by an error of the proxy or the engine, or because the harness left."""


@dataclass
class Findings:
    """The findings, as sentences.

    `turns` were received whole, of which `recorded` are in a turn. `continued` turns have several pieces. `marked` are the sessions marked
    incomplete, with the kinds of holes that they name. `outcomes` counts sessions. `incidents` has what the sessions report, for the
    sentences about them.
    """

    turns: int = 0
    recorded: int = 0
    continued: int = 0
    lost: list[str] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    misjudged: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    marked: dict[str, list[str]] = field(default_factory=dict)
    incidents: dict[str, list[str]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    beheaded: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.false or self.unmarked or self.unnamed or self.misjudged)

    @property
    def words(self) -> str:
        names = ("lost", "false", "unmarked", "unnamed", "misjudged")
        kinds: dict[str, list[str]] = {name: getattr(self, name) for name in names}
        lines = [f"{kind}: {one}" for kind, found in kinds.items() for one in found]
        lines += [f"session {session} reports {one}" for session in sorted(self.suspects) for one in self.incidents.get(session, ())]
        return "\n".join(lines)

    @property
    def suspects(self) -> set[str]:
        """The sessions about which there are sentences."""
        sentences = (*self.lost, *self.false, *self.unmarked, *self.unnamed, *self.misjudged)
        return {sentence.removeprefix("session ").partition(":")[0].partition(",")[0] for sentence in sentences}


@dataclass
class _Recorded:
    """A turn as it is exported, with its tokens."""

    turn: dict[str, Any]
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]


def check(
    asked: Iterable[Asked],
    ground_truth: Iterable[GroundTruthEntry],
    exports: Mapping[str, dict[str, Any] | None],
    *,
    memory_lost: bool = False,
) -> Findings:
    """Compares the records; `exports` are native trajectories, `None` for a session that does not exist."""
    found = Findings()
    calls: dict[str, list[Asked]] = defaultdict(list)
    for one in asked:
        calls[one.session].append(one)
    entries: dict[str, list[GroundTruthEntry]] = defaultdict(list)
    for entry in ground_truth:
        if entry.completion_ids:
            entries[entry.session or ""].append(entry)
    for session in {*calls, *exports}:
        export = exports.get(session)
        if export is None:
            _missing(session, calls[session], entries[session], found, memory_lost=memory_lost)
        else:
            _Session(session, calls[session], entries[session], export, found).check(memory_lost=memory_lost)
    return found


def _missing(session: str, calls: Sequence[Asked], entries: Sequence[GroundTruthEntry], found: Findings, *, memory_lost: bool) -> None:
    """A session that the store does not have."""
    received = [one for one in calls if one.received is not None]
    found.turns += len(received)
    if memory_lost:
        found.gone.append(session)
        return
    found.lost += [f"session {session}, call {one.mark}: was received whole, and the session does not exist" for one in received]
    found.unmarked += [
        f"session {session}: {len(e.completion_ids)} tokens were sampled, and it does not exist" for e in entries if not received
    ]


class _Session:
    """One session that was exported."""

    def __init__(
        self, name: str, calls: Sequence[Asked], entries: Sequence[GroundTruthEntry], export: Mapping[str, Any], found: Findings
    ) -> None:
        self._name, self._calls, self._found = name, calls, found
        self._left = list(entries)
        self._export = export
        self._turns = {one.turn["turn"]: one for one in _recorded(export)}
        self._holes = [incident["kind"] for incident in export["incidents"] if incident["hole"]]
        found.incidents[name] = [f"{one['kind']} {one['call']}: {one['detail']}" for one in export["incidents"]]
        if not export["complete"]:
            found.marked[name] = sorted(set(self._holes)) or ["without a reason"]

    def check(self, *, memory_lost: bool) -> None:
        counted = Counter(turn["turn"] for sequence in self._export["sequences"] for turn in sequence["turns"])
        self._false(*[f"turn {turn}: is trained {times} times" for turn, times in counted.items() if times > 1])
        self._false(*map(str, verify(msgspec.convert(self._export, Trajectory))))
        if not self._export["complete"] and not self._holes:
            self._false("is incomplete without a reason")
        by_mark = {one.mark: one for one in self._calls}
        answers: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        for one in sorted(self._turns.values(), key=lambda one: bool(_CUT_SHORT & set(one.turn["marks"]))):
            marks = _marks(_text(one.prompt))
            self._check_history(one, marks, by_mark)
            self._check_ground_truth(one)
            self._parent(one)
            if marks:
                answers[marks[-1]].append(_said(_text(one.completion)))
        headless = memory_lost and any(one.turn["reason"] == UNKNOWN for one in self._turns.values())
        if headless:
            self._found.beheaded.append(self._name)
        self._lost(answers, forgiven=headless or not self._export["complete"])
        if not headless:
            self._unmarked()
        if not memory_lost:
            self._outcome(answers)

    def _lost(self, answers: Mapping[str, list[tuple[str, Any]]], *, forgiven: bool) -> None:
        for call in self._calls:
            if call.received is None:
                continue
            self._found.turns += 1
            if _key(call.received.text, [(name, arguments) for _, name, arguments in call.received.calls]) in answers[call.mark]:
                self._found.recorded += 1
            elif not forgiven:
                self._found.lost.append(f"session {self._name}, call {call.mark}: was received whole, and no turn records it ({call.ends})")

    def _unmarked(self) -> None:
        """What was sampled and is in no turn: an incident must name its call, whose id is the end of the request's."""
        named = [incident["call"] for incident in self._export["incidents"] if incident["call"]]
        for entry in self._left:
            if not any(call in entry.request_id for call in named):
                words = f"session {self._name}: {len(entry.completion_ids)} tokens of {entry.request_id} were sampled and not recorded"
                (self._found.unmarked if self._export["complete"] else self._found.unnamed).append(words)

    def _outcome(self, answers: Mapping[str, list[tuple[str, Any]]]) -> None:
        """Whether the outcome is what the harness knows of its last call. One with a turn may have been sent whole, and not been read."""
        last, kind, complete = self._calls[-1], self._export["outcome"], self._export["complete"]
        self._found.outcomes[kind] += 1
        told = f"the harness's last call ended with {last.ends}, and the outcome is {kind} ({self._export['outcome_detail']})"
        if self._export["valid"] != (complete and kind == "ok"):
            self._false(f"is valid: {self._export['valid']}, complete: {complete}, and the outcome is {kind}")
        elif last.received is None and last.mark not in answers and _SEEN.fullmatch(last.ends[-1]) and self._export["valid"]:
            self._found.misjudged.append(f"session {self._name}: is valid although {told}")
        elif last.received is not None and complete and kind != "ok":
            self._found.misjudged.append(f"session {self._name}: is not valid although {told}")

    def _false(self, *words: str) -> None:
        self._found.false += [f"session {self._name}: {one}" for one in words]

    def _check_history(self, one: _Recorded, marks: list[str], by_mark: Mapping[str, Asked]) -> None:
        """The prompt must contain exactly the history of the call that it answers."""
        call = by_mark.get(marks[-1]) if marks else None
        if call is None:
            self._false(f"turn {one.turn['turn']}: answers no call of this session's harness ({marks[-1:]})")
        elif tuple(marks) != call.marks:
            self._false(f"turn {one.turn['turn']}: its prompt has the marks {marks}, its call's history {call.marks}")

    def _check_ground_truth(self, one: _Recorded) -> None:
        """The log must have an entry of each piece's tokens, or of more tokens if the engine broke it off or the turn is cut short."""
        cut_short = bool(_CUT_SHORT & set(one.turn["marks"]))
        pieces = [(piece["start"], piece["end"]) for piece in one.turn["pieces"]] or [(0, len(one.completion))]
        self._found.continued += len(pieces) > 1
        if [start for start, _ in pieces] != [0, *(end for _, end in pieces[:-1])] or pieces[-1][1] != len(one.completion):
            self._false(f"turn {one.turn['turn']}: its pieces {pieces} are not its {len(one.completion)} tokens")
        for number, (start, end) in enumerate(pieces, 1):
            if not self._take_entry(one, start, end, cut_short=cut_short or number < len(pieces)):
                self._false(f"turn {one.turn['turn']} ({one.turn['match']}): the log has no such generation of the tokens {start} to {end}")

    def _take_entry(self, one: _Recorded, start: int, end: int, *, cut_short: bool) -> bool:
        """Take the entry of a part of a turn from the log; false if there is none."""
        n, prompt = end - start, one.prompt + one.completion[:start]
        for entry in self._left:
            same = entry.prompt_ids == prompt and entry.completion_ids[: n if cut_short else None] == one.completion[start:end]
            if same and ("no-logprobs" in one.turn["marks"] or entry.logprobs[:n] == one.logprobs[start:end]):
                self._left.remove(entry)
                return True
        return cut_short and not n  # it may have been cut off before its first token

    def _parent(self, one: _Recorded) -> None:
        if (one.turn["parent"] is not None) != (one.turn["match"] in {"continue", "branch"}):
            self._false(f"turn {one.turn['turn']}: is a {one.turn['match']}, its parent is {one.turn['parent']}")
        parent = self._turns.get(one.turn["parent"] or "")
        if parent is not None and one.prompt[: len(parent.prompt) + len(parent.completion)] != parent.prompt + parent.completion:
            self._false(f"turn {one.turn['turn']}: does not begin with the tokens of its parent {parent.turn['turn']}")


def _recorded(export: Mapping[str, Any]) -> list[_Recorded]:
    found = []
    for sequence in export["sequences"]:
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            tokens = sequence["token_ids"]
            found.append(_Recorded(turn, tokens[:start], tokens[start:end], sequence["logprobs"][start:end]))
    return found


@cache
def _tokenizer() -> SimTokenizer:
    return build_tokenizer()


def _text(token_ids: Sequence[int]) -> str:
    return _tokenizer().decode(token_ids)


def _marks(text: str) -> list[str]:
    """The marks in a prompt, each once, in order: the results of several calls of one turn have the same one."""
    return list(dict.fromkeys(_MARK.findall(text)))


def _said(completion: str) -> tuple[str, Any]:
    parsed = parse_reply(completion, tools=True)
    return _key(parsed.content or "", parsed.tool_calls)


def _key(text: str, calls: Iterable[tuple[str, str]]) -> tuple[str, Any]:
    """The dialect-independent content of a reply."""
    return text.strip(), [(name, json.loads(arguments or "{}")) for name, arguments in calls]
