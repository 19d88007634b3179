"""What the oracle observes and finds: entries of a client's history, turns that were sampled, findings, counts."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tests.system.adversary.words import (
    DRAWN,
    Message,
    arguments_of,
    call_ids,
    cut_thought,
    meaning,
    safe,
    says,
    shown,
    stripped,
    text_of,
    thoughts,
    without_text,
)

if TYPE_CHECKING:
    from tests.system.adversary.template_reading import ReplyOpening

NEVER = ("false", "unfaithful", "lost", "trained twice", "broken", "mislabelled", "internal-error")


@dataclass(frozen=True)
class Entry:
    """One entry of a client's history, in chat format.

    `turn` is the number of the turn that sampled it, `None` for the client's own messages; where a reply was edited, its words decide
    whether it still is that turn's (`Oracle.truth`). `owed` is false where the client changed it in a way that no rule covers, such as
    sending it twice.

    A harness may also keep another message than it was served, and the record proves it all the same. Then `kept` is what it made of the
    reply: the prompt may have the turn's tokens as long as the message says just that.

    Attributes:
        added: the text at the end that the harness wrote, `stop` the stop string at which the reply ended. Instead of that text any other
            may follow the reply, as long as it begins with the stop string.
        parts: the turns that sampled it, if it was sampled in several calls.
        begun: whether the client wrote its beginning itself, so that its reasoning is the client's, too.
        continues: whether it was cut, and the model's next reply continues it.
    """

    message: Message
    turn: int | None = None
    owed: bool = True
    handle: str = ""
    kept: Message | None = None
    added: str = ""
    stop: str = ""
    parts: tuple[int, ...] = ()
    begun: bool = False
    continues: bool = False

    @functools.cached_property
    def exact(self) -> str:
        """The message as the client wrote it, apart from what no template can show.

        A single text part is the same as a string, and arguments are compared by value (rule `args-json`). A member that is null is not the
        same as none.
        """
        calls, content = self.message.get("tool_calls") or (), self.message.get("content")
        functions = [{**call["function"], "arguments": arguments_of(call["function"]["arguments"])} for call in calls]
        text = {"content": content[0]["text"]} if isinstance(content, list) and len(content) == 1 else {}
        return json.dumps([self.message | text | {"tool_calls": [call["id"] for call in calls]}, functions], sort_keys=True)

    @functools.cached_property
    def loose(self) -> tuple[Any, ...]:
        """The message in normalised form, without ids."""
        return meaning(self.message)

    @functools.cached_property
    def thoughts(self) -> set[str]:
        """The reasoning in it."""
        return thoughts(self.message)

    @property
    def is_kept(self) -> bool:
        """Whether it still is what the harness made of the reply."""
        if self.kept is None or (self.begun and self.thoughts != thoughts(self.kept)):
            return False
        if not self.added:
            return says(self.message, self.kept)
        before = {"content": text_of(self.message).removesuffix(self.words)}, {"content": text_of(self.kept).removesuffix(self.added)}
        with_words = bool(self.words.strip()) and self.words.startswith(self.stop.rstrip())
        return with_words and says(self.message | before[0], self.kept | before[1])

    @functools.cached_property
    def words(self) -> str:
        """The harness's words at its end. They are all of its text if the reply was thinking alone."""
        if self.kept is None or not self.added:
            return ""
        if self.thoughts and text_of(self.kept) == self.added:
            return text_of(self.message)
        said, now = shown(self.kept).removesuffix(self.added), shown(self.message)
        return now.removeprefix(said) if now.startswith(said) else ""

    @functools.cached_property
    def without_stop(self) -> tuple[Any, ...]:
        """The message in normalised form, without the stop string that the harness wrote back: it is the same reply."""
        if not self.words or self.words.rstrip() != self.stop.rstrip():
            return self.loose
        return meaning(self.message | {"content": text_of(self.message).removesuffix(self.words)})

    @property
    def is_reply(self) -> bool:
        return self.message["role"] == "assistant"


class Span(NamedTuple):
    """A turn's tokens within a prompt: the place of the message, the number of the turn, the first token and the one after the last.

    `offset` is the number of the turn's tokens before these: its thinking, where the session follows the template.
    """

    place: int
    turn: int
    start: int
    end: int
    offset: int = 0


@dataclass
class SampledTurn:
    """A turn as the oracle observed it."""

    number: int
    reply: Message
    entries: tuple[Entry, ...]
    scope: str
    """The tools and the template's arguments it was sampled under."""
    prompt: list[int]
    completion: list[int]
    spans: list[Span]
    opening: ReplyOpening
    """The generation prompt after which it was sampled."""
    last: int | None
    """The turn whose tokens are the last reply before it."""
    handle: str = ""
    thinking: str = ""
    """The text of its thinking, also where its message has none."""
    served: int = 0
    """The number of characters of its text that the client received."""
    continues: bool = False
    """Whether it continues the last message of its request."""
    kept: Message | None = None
    """What its harness is known to make of it."""
    ends: tuple[int, ...] = ()
    """Of a reply that its client left: the numbers of characters of its text up to the end of each call that the client received."""
    stop: str = ""
    """The stop string at which it ended."""
    begins: tuple[int, int] | None = None
    """Of a reply that was cut before its first call was complete: the numbers of characters before its reasoning, and before its text."""

    begun: Message = field(default_factory=dict)
    """The call within which it was cut, as its client received it."""

    @property
    def was_cut(self) -> bool:
        """Whether its client received only the beginning, and may have kept less of that."""
        return bool(self.ends) or self.begins is not None

    @property
    def thought(self) -> str:
        """Its reasoning."""
        return self.reply.get("reasoning") or ""

    @functools.cached_property
    def words(self) -> tuple[Any, ...]:
        """Its words, without its reasoning."""
        return meaning(self.reply)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The ids of its calls, as the strictest client writes them."""
        return tuple(map(safe, call_ids(self.reply)))

    @functools.cached_property
    def forms(self) -> dict[tuple[Any, ...], set[str]]:
        """The words with which it may come back, and its reasoning then.

        Thinking that was cut off in the text may become reasoning. Of a reply that its client left, the first calls may come back alone, or
        the beginning of its text, or of its thinking.
        """
        found: dict[tuple[Any, ...], set[str]] = {}
        calls = self.reply.get("tool_calls") or []
        cut = [{**self.reply, "tool_calls": calls[:n]} for n in range(1, len(self.ends))]
        if self.was_cut:
            text = text_of(self.reply)
            alone = {"role": "assistant", "reasoning": self.thought}
            cut += [{**alone, "content": text[:n]} for n in range(1, len(text) + 1) if stripped(text[:n])]
            cut += [{**alone, "reasoning": self.thought[:n]} for n in range(len(self.thought) + 1)]
        for form in (self.reply, cut_thought(self.reply), self.kept, *cut):
            if form is not None:
                found[meaning(form)] = found.get(meaning(form), set()) | thoughts(form)
        return found

    def is_said_by(self, entry: Entry) -> bool:
        """Whether an entry has the words of this turn, and no other reasoning.

        Calls exactly as they were issued, under ids that were drawn, need no text beside them (rule `text-dropped`).
        """
        if entry.loose in self.forms:
            return entry.thoughts <= self.forms[entry.loose]
        verbatim = entry.message.get("tool_calls") == self.reply.get("tool_calls") and all(map(DRAWN.search, self.names))
        alone = without_text(self.reply, ())
        return verbatim and entry.loose == meaning(alone) and entry.thoughts <= thoughts(alone)

    @functools.cached_property
    def loose(self) -> tuple[Any, ...]:
        return tuple(entry.loose for entry in self.entries)


@dataclass(frozen=True)
class Finding:
    """A violation: its class, session, call, template, and description."""

    kind: str
    session: int
    call: int
    template: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.template}, session {self.session}, call {self.call}: {self.what}"


@dataclass
class Tally:
    """Counts by name, and the first findings of every class."""

    counts: Counter[str] = field(default_factory=Counter)
    matches: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    """For a session that is replayed: what was done and sent."""

    def find(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if self.counts[finding.kind] <= 50:
            self.findings.append(finding)

    def __iadd__(self, other: Tally) -> Self:
        for name in ("counts", "matches", "reasons", "missed"):
            getattr(self, name).update(getattr(other, name))
        self.findings += other.findings
        return self

    def table(self) -> str:
        """The counts, one per line."""
        played = (
            "understood otherwise",
            "added to",
            "joined",
            "broken off",
            "broken off in a text",
            "kept",
            "budgets",
            "budgets unproven",
            "cut",
        )
        lines = [(name, self.counts[name]) for name in ("turns", "refused", "not read", "served otherwise", *played)]
        lines += [(f"  {name}", number) for name, number in self.matches.most_common()]
        lines += [(name, self.counts[name]) for name in (*NEVER, "no rendering", "owed", "not placed", "missed")]
        lines += [(f"  {name}", number) for name, number in self.missed.most_common(20)]
        return "\n".join(f"{name:60} {number:9}" for name, number in lines)

    def shown(self, most: int, *, misses: bool = False) -> list[str]:
        """The first findings of every class."""
        kinds = [*NEVER, "no rendering", *(["missed"] if misses else [])]
        return [str(one) for kind in kinds for one in [one for one in self.findings if one.kind == kind][:most]]

    @property
    def guilty(self) -> bool:
        """Whether there is a violation; misses are counted but allowed."""
        return any(self.counts[kind] for kind in NEVER)
