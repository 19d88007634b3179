"""Joins the turns of a session to sequences that a trainer can use in its loss.

The turns form a forest: a turn's prompt starts with the prefix of its parent. One child of a turn, its *main child*, continues its
sequence: the child with the deepest line after it; among equals a complete reply rather than one that broke off, then the first recorded.
Every other child (a retry with a discarded answer, a parallel sub-agent, a rollback) starts a sequence of its own. That sequence repeats
the preceding tokens with mask 0. So every sampled token is trained exactly once, whatever the shape of the tree.
"""

from collections.abc import Mapping, Sequence

import msgspec

from tokencache.core import ids
from tokencache.core.experts import ExpertPart, file_parts
from tokencache.core.media import PlacedMedia
from tokencache.core.turn import UNRECEIVED, Tokens, Turn, TurnMark, extend_prefix, rebuild_prefix


class SequenceTurn(msgspec.Struct, frozen=True):
    """A turn inside a sequence. `prompt` (only its new part) and `completion` are half-open ranges of the sequence's tokens."""

    turn: Turn
    prompt: tuple[int, int]
    completion: tuple[int, int]


class TokenSequence(msgspec.Struct, frozen=True):
    """A line of turns, each extending the one before, as one sequence of tokens.

    The trainer decides which sequences it uses. For example, a call that only makes a title is not continued and has no tools; a retry with
    a discarded answer is a branch that is not continued.

    Attributes:
        id: the id of its first turn.
        parent: the id of the sequence from which it branches or took its context; `None` if there is none.
        start: how it begins: `root`, `branch`, `resplice` or `plain`; `reason` explains it (`core.reasons`).
        token_ids, loss_mask, logprobs: one entry per token. A token with mask 1 was sampled by the policy in this sequence, and its entry
            in `logprobs` is the natural logarithm of the probability that it was sampled with. Every other token has mask 0 and 0.0.
        turns: its turns.
        continued: whether a later call continues one of its turns, in this sequence or in a branch.
        tools: the number of tools that its first call offered.
        model: the model that sampled it. No turn continues that of another model.
        root: the id of the sequence that is reached by following `parent`. If several rollouts share a session, each has its own root.
        overlong: `cut` or `masked` if it was longer than the limit of an export (`trajectories.lengths`), otherwise `""`.
        experts: the files with the routed experts of its tokens (`core.experts`).
        media: its images and other media, in order; `start` is an index of `token_ids`.
        versions, mixed_tokens, oldest_version, newest_version: the policy versions of its trainable tokens (`trajectories.versions`).
    """

    id: str
    parent: str | None
    start: str
    reason: str
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    turns: list[SequenceTurn]
    continued: bool = False
    tools: int = 0
    model: str = ""
    root: str = ""
    overlong: str = ""
    experts: list[ExpertPart] = []
    media: tuple[PlacedMedia, ...] = ()
    versions: dict[str, int] = {}
    mixed_tokens: int = 0
    oldest_version: str = ""
    newest_version: str = ""

    @property
    def response_start(self) -> int:
        """The index of the first token that was sampled in this session, or, without any, in one that it was forked from.

        The number of tokens if none was sampled.
        """
        sampled = [span for span in self.turns if span.turn.completion_tokens]
        own = [span for span in sampled if TurnMark.SHARED not in span.turn.marks]
        return next((span.completion[0] for span in own or sampled), len(self.token_ids))

    @property
    def trained(self) -> list[Turn]:
        """The turns with tokens that have mask 1."""
        return [span.turn for span in self.turns if any(self.loss_mask[slice(*span.completion)])]

    @property
    def trainable(self) -> int:
        """The number of tokens with mask 1."""
        return sum(self.loss_mask)


def lineages(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Split turns, in the order in which they were recorded, into lines in which each turn continues the one before."""
    main_child = _main_children(turns)
    line_of: dict[str, list[Turn]] = {}
    found: list[list[Turn]] = []
    for turn in turns:
        if turn.parent in line_of and main_child[turn.parent] == turn.id:
            line = line_of[turn.parent]
            line.append(turn)
        else:
            line = [turn]
            found.append(line)
        line_of[turn.id] = line
    return found


def _main_children(turns: Sequence[Turn]) -> dict[str, str]:
    """Choose the main child of each turn that has children."""
    depth: dict[str, int] = {}
    best: dict[str, tuple[tuple[int, bool], str]] = {}
    for turn in reversed(turns):  # children are recorded after their parents
        depth[turn.id] = 1 + best[turn.id][0][0] if turn.id in best else 0
        if turn.parent is not None:
            rank = (depth[turn.id], UNRECEIVED.isdisjoint(turn.marks))
            if turn.parent not in best or rank >= best[turn.parent][0]:  # among equals the first recorded, which this loop reaches last
                best[turn.parent] = (rank, turn.id)
    return {parent: child for parent, (_, child) in best.items()}


def sequences(turns: Sequence[Turn], tokens: Mapping[str, Tokens]) -> list[TokenSequence]:
    """Build all sequences of a session from its turns, in the order in which they were recorded, and their tokens.

    Raises:
        KeyError: tokens of a turn are missing.
        ValueError: the records are torn: a turn does not extend its parent, or lengths differ.
    """
    lookup = {turn.id: (turn, tokens[turn.id]) for turn in turns}
    by_id = {turn.id: turn for turn in turns}
    parents = {turn.parent for turn in turns}
    built = []
    lines = lineages(turns)
    for line, (parent, root) in zip(lines, ancestries(lines), strict=True):
        continued = any(turn.id in parents for turn in line)
        sequence = _sequence(line, lookup, parent, root, continued=continued)
        built.append(msgspec.structs.replace(sequence, experts=file_parts(line[-1], by_id), media=line[-1].media))
    return built


def ancestries(lines: Sequence[Sequence[Turn]]) -> list[tuple[str | None, str]]:
    """Return for each line the id of the one from which it branches or took its context, `None` if there is none, and that of its root."""
    name_of: dict[str, str] = {}
    root_of: dict[str | None, str] = {}
    found: list[tuple[str | None, str]] = []
    for line in lines:
        first = line[0]
        parent = name_of.get(first.parent or first.origin or "")
        root_of[first.id] = root_of.get(parent, first.id)
        found.append((parent, root_of[first.id]))
        name_of.update(dict.fromkeys((turn.id for turn in line), first.id))
    return found


def training_values(turn: Turn, tokens: Tokens) -> tuple[list[int], list[float]]:
    """Return the loss mask and the log probabilities of a turn's completion; zeros if it is not trained."""
    logprobs = ids.unpack_logprobs(tokens.logprobs)
    if len(logprobs) == turn.completion_tokens and TurnMark.NOT_TRAINABLE not in turn.marks:
        return turn.chosen_mask(), logprobs
    return [0] * turn.completion_tokens, [0.0] * turn.completion_tokens


def _sequence(line: list[Turn], lookup: dict[str, tuple[Turn, Tokens]], parent: str | None, root: str, *, continued: bool) -> TokenSequence:
    packed = bytearray(rebuild_prefix(lookup, line[0].id).ids)
    mask: list[int] = []
    logprobs: list[float] = []
    spans = []
    for turn in line:
        sampled = lookup[turn.id][1]
        if turn is not line[0]:  # its base is its parent, whose prefix is `packed`
            at = turn.shared * ids.ID_BYTES
            unshared = bytes(packed[at:])  # stored again with this turn, so it must be the same
            extend_prefix(packed, turn, sampled)
            if not packed.startswith(unshared, at):
                raise ValueError(f"turn {turn.id} does not extend turn {turn.parent}")
        before, start = len(mask), turn.prompt_tokens
        completion_mask, values = training_values(turn, sampled)
        mask += [0] * (start - before) + completion_mask
        logprobs += [0.0] * (start - before) + values
        spans.append(SequenceTurn(turn, (before, start), (start, len(mask))))
    start_kind = "branch" if line[0].match == "continue" else line[0].match
    return TokenSequence(
        id=line[0].id,
        parent=parent,
        start=start_kind,
        reason=line[0].reason,
        token_ids=ids.unpack(bytes(packed)),
        loss_mask=mask,
        logprobs=logprobs,
        turns=spans,
        continued=continued,
        tools=line[0].tools,
        model=line[0].model,
        root=root,
    )
