"""Collects the calls of sessions as a trace: what a benchmark or a simulator needs to replay them, and nothing of their content.

A trace belongs to many sessions, because prompts of different sessions begin with the same tokens. So an export adds one session after the
other to a `Trace`, and a format (`agentic_mooncake`, `weka`) writes all its calls at the end.

Recorded facts become numbers that are counted from 0 within the file: sessions, sequences, calls, models and blocks of tokens. Two prompts
have the same block id in a place exactly if they have the same model, tokens and images up to the end of that block. A file therefore says
which calls share how long a prefix, and does not depend on the tokens: a trace of the same calls with other tokens, texts and names is the
same file.
"""

from array import array
from collections import defaultdict
from collections.abc import Sequence as Sequential
from typing import Literal, NamedTuple

from tokencache.core import ids
from tokencache.core.turn import TurnMark
from tokencache.trajectories.values import Sequence, Trajectory, TurnSpan

BLOCK_SIZE = 64
"""Tokens of a block, unless the user chooses another number: the default of AISimulate for vLLM (Dynamo 1.6.1) and of Weka traces."""


class Dependency(NamedTuple):
    """A call that must have ended before another one begins.

    Attributes:
        call: its number.
        kind: `sequence` if the other call continues its sequence; `spawn` if the other one begins a sequence with the context, or the
            summary, that this call ended with; `join` if the other one's request is the first to contain the answer of this sub-agent.
        wait: seconds between its end and the begin of the other one, as recorded.
    """

    call: int
    kind: Literal["sequence", "spawn", "join"]
    wait: float


class Call(NamedTuple):
    """One turn of a session. The choices of a call with n > 1 are n of these.

    Attributes:
        number, session, sequence, model: counted from 0 in the trace. Within a sequence each prompt begins with the prompt and the reply of
            the call before it, token for token.
        begun: Unix time in seconds. `seconds`: how long the call took, until the end of its reply.
        prompt, completion: number of tokens.
        blocks: the ids of the prompt's blocks. The last one is shorter if the prompt does not end with a block.
        after: the calls whose replies its request contains; empty if none is known.
        calls_tools: whether its reply calls tools: the wait until the next call of its sequence is for them.
        stopped: whether the engine ended the reply normally. `stream`: whether the reply was streamed.
    """

    number: int
    session: int
    sequence: int
    model: int
    begun: float
    seconds: float
    prompt: int
    completion: int
    blocks: Sequential[int]
    after: tuple[Dependency, ...]
    calls_tools: bool
    stopped: bool
    stream: bool


class Trace:
    """The calls of the sessions that were added to it. Work and memory grow with the number of their tokens.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self.calls: list[Call] = []
        self._sessions = self._sequences = 0
        self._models: dict[str, int] = {}
        self._blocks: dict[tuple[int, bytes, tuple[tuple[str, int], ...]], int] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Add the calls of a session. Those that belong to the session from which it was forked (`shared`) are left out."""
        blocks: dict[str, array[int]] = {}
        sequence_of: dict[str, int] = {}
        begun: dict[str, float] = {}
        own: list[TurnSpan] = []
        for sequence in trajectory.sequences:
            own += (spans := [span for span in sequence.turns if TurnMark.SHARED not in span.marks])
            blocks |= self._blocks_of(sequence, spans)
            sequence_of |= dict.fromkeys((span.turn for span in spans), self._sequences)
            self._sequences += bool(spans)
            for span in sequence.turns:  # parents come first; the clocks of two replicas may differ
                begun[span.turn] = max(span.created, begun.get(span.parent or span.origin or "", span.created))
        own.sort(key=lambda span: begun[span.turn])
        numbers = {span.turn: number for number, span in enumerate(own, len(self.calls))}
        ended = {span.turn: begun[span.turn] + span.seconds for span in own}
        kinds = _kinds(trajectory, own, sequence_of)
        for span in own:
            turn = span.turn
            self.calls.append(
                Call(
                    number=numbers[turn],
                    session=self._sessions,
                    sequence=sequence_of[turn],
                    model=self._model(span.model),
                    begun=begun[turn],
                    seconds=span.seconds,
                    prompt=span.completion[0],
                    completion=span.completion_tokens,
                    blocks=blocks[turn],
                    after=tuple(
                        Dependency(numbers[source], kind, max(0.0, begun[turn] - ended[source]))
                        for source, kind in kinds[turn].items()
                        if numbers.get(source, numbers[turn]) < numbers[turn]
                    ),
                    calls_tools=bool(span.served.tool_calls),
                    stopped=span.finish_reason in {"stop", "tool_calls"},
                    stream=span.stream,
                )
            )
        self._sessions += bool(own)

    def _model(self, name: str) -> int:
        return self._models.setdefault(name, len(self._models))

    def _blocks_of(self, sequence: Sequence, spans: Sequential[TurnSpan]) -> "dict[str, array[int]]":
        """Return the ids of the blocks of each prompt of a sequence, by turn."""
        packed, size = ids.pack(sequence.token_ids), self.block_size * ids.ID_BYTES
        media = self._media_of(sequence)
        whole: dict[int, array[int]] = defaultdict(lambda: array("q"))  # the full blocks, by model
        found = {}
        for span in spans:
            model = self._model(span.model)
            known, end = whole[model], span.completion[0] * ids.ID_BYTES
            for place in range(len(known), end // size):
                known.append(self._block(known, model, packed[place * size : (place + 1) * size], media.get(place, ())))
            found[span.turn] = known[:]
            if end % size:
                found[span.turn].append(self._block(known, model, packed[end - end % size : end], media.get(len(known), ())))
        return found

    def _block(self, before: "array[int]", model: int, tokens: bytes, media: tuple[tuple[str, int], ...]) -> int:
        """Return the id of a block after others: the same for the same blocks before it, tokens and media, otherwise a new one."""
        key = (before[-1] if before else -1 - model, tokens, media)
        return self._blocks.setdefault(key, len(self._blocks))

    def _media_of(self, sequence: Sequence) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return the media in each block of a sequence: digest and place. What is not known of them equals nothing in other sequences."""
        unknown = f"unknown, of sequence {self._sequences}"
        if sequence.has_unplaced_media:
            return {0: ((unknown, 0),)}
        found: dict[int, tuple[tuple[str, int], ...]] = {}
        for medium in sequence.media:
            known = (medium.sha256 or unknown, medium.start)
            for place in range(medium.start // self.block_size, (medium.end - 1) // self.block_size + 1):
                found[place] = (*found.get(place, ()), known)
        return found


def _kinds(
    trajectory: Trajectory, own: Sequential[TurnSpan], sequence_of: dict[str, int]
) -> dict[str, dict[str, Literal["sequence", "spawn", "join"]]]:
    """Return for each turn the turns whose replies its request contains, and what they are to it."""
    found: dict[str, dict[str, Literal["sequence", "spawn", "join"]]] = defaultdict(dict)
    for span in own:
        before = span.parent or span.origin
        if before is not None:
            found[span.turn][before] = "sequence" if sequence_of.get(before) == sequence_of[span.turn] else "spawn"
    for link in trajectory.links:
        if len(link.sources) == 1:  # of several with the same text, it is not known which one returned
            found[link.turn].setdefault(link.sources[0], "join" if link.kind == "delegation" else "spawn")
    return found
