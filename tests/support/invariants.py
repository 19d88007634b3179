"""Checks what must always hold for a session.

================  ====================================================================================================
`extension`       within a lineage, the prompt of a turn starts with the prefix of the turn before it
`engine_agrees`   the records are exactly what the engine received and generated
`fidelity`        outside the model's own spans, a spliced prompt decodes to the template's rendering
`trained_once`    each sampled token has loss mask 1 once, after its own prompt, with its own log probability
`aligned`         a sequence's ids, mask and log probabilities have one length, which its turns cover without a gap
`linear`          a turn that extends another stores only what it adds
`apart`           no turn refers to a turn of another model
`anchored`        the replies that a turn's prompt names as anchors are there, with the ids that their turns sampled
`audit`           all of these that need only a session's records
================  ====================================================================================================

Each function returns a list of violations: sentences that name the session (if given), the turn and the position. An empty list means
that the invariant holds. No function raises an exception for wrong records.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokencache.core import ids
from tokencache.core.lineage import SequenceTurn, TokenSequence, sequences
from tokencache.core.turn import Tokens, Turn, TurnMark

GroundTruthEntry = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""One generation in the engine's own log: prompt ids, completion ids, log probabilities of the completion."""


def extension(turns: Sequence[Turn], tokens: Mapping[str, Tokens], *, session: str = "") -> list[str]:
    """Check that every turn's prompt starts with its parent's prefix, token for token.

    `turns` are in the order in which they were recorded. These are violations too: a turn with tokens that cannot be rebuilt, a `continue`
    or `branch` without a parent, and any other turn with a parent.
    """
    prompts, found = _prompts(turns, tokens)
    for turn in turns:
        if (turn.parent is not None) != (turn.match in ("continue", "branch")):
            found.append(f"turn {turn.id}: is a {turn.match} and has {'a' if turn.parent else 'no'} parent")
        if turn.parent is None or turn.id not in prompts:
            continue
        if turn.parent not in prompts:
            found.append(f"turn {turn.id}: its parent {turn.parent} is not recorded before it")
            continue
        prefix = prompts[turn.parent] + tokens[turn.parent].completion
        same = ids.common_head(prefix, prompts[turn.id])
        if same < ids.count(prefix):
            found.append(f"turn {turn.id}: leaves the prefix of its parent {turn.parent} at token {same} of {ids.count(prefix)}")
    return _of(session, found)


def engine_agrees(turns: Sequence[Turn], tokens: Mapping[str, Tokens], log: Iterable[GroundTruthEntry], *, session: str = "") -> list[str]:
    """Compare the records of a session with the engine's own log, one to one.

    A turn marked `aborted` may contain only the beginning of what the engine generated. A turn marked `no-logprobs` is compared without
    log probabilities. Everything else must be equal, and no entry of the log may be left over.
    """
    prompts, found = _prompts(turns, tokens)
    entries = [(ids.pack(p), ids.pack(c), list(lp)) for p, c, lp in log]
    left = list(range(len(entries)))
    whole_first = sorted((t for t in turns if t.id in prompts), key=lambda t: bool({TurnMark.ABORTED, TurnMark.NO_LOGPROBS} & set(t.marks)))
    unmatched = []
    for turn in whole_first:
        entry = next((n for n in left if _is_entry(turn, prompts[turn.id], tokens[turn.id], entries[n])), None)
        if entry is None:
            unmatched.append(turn.id)
        else:
            left.remove(entry)
    found += [f"turn {turn}: {_nearest(prompts[turn], tokens[turn], [entries[n] for n in left])}" for turn in unmatched]
    found += [
        f"engine's entry {n}: recorded by no turn ({ids.count(entries[n][0])} prompt and {ids.count(entries[n][1])} completion tokens)"
        for n in left
    ]
    return _of(session, found)


def _is_entry(turn: Turn, prompt: bytes, own: Tokens, entry: tuple[bytes, bytes, list[float]]) -> bool:
    if prompt != entry[0]:
        return False
    n = ids.count(own.completion)
    aborted, bare = TurnMark.ABORTED in turn.marks, TurnMark.NO_LOGPROBS in turn.marks
    if not (entry[1].startswith(own.completion) if aborted else entry[1] == own.completion):
        return False
    return (bare and not own.logprobs) or ids.unpack_logprobs(own.logprobs) == entry[2][:n]


def _nearest(prompt: bytes, own: Tokens, entries: Sequence[tuple[bytes, bytes, list[float]]]) -> str:
    for entry_prompt, completion, _ in entries:
        if entry_prompt == prompt and completion == own.completion:
            return "the engine has other log probabilities"
        if entry_prompt == prompt:
            return f"the engine has another completion from token {ids.common_head(completion, own.completion)} on"
    best = max((ids.common_head(entry[0], prompt) for entry in entries), default=0)
    return f"none of the engine's entries left over has this prompt of {ids.count(prompt)} tokens (the nearest shares {best})"


def fidelity(
    prompt: Sequence[int],
    own: Sequence[tuple[int, int]],
    decode: Callable[[Sequence[int]], str],
    rendered: str,
    written: Sequence[str],
    *,
    session: str = "",
) -> list[str]:
    """Check that outside the model's own spans a spliced prompt decodes to the template's rendering of the harness's messages.

    Args:
        prompt: the ids that were sent.
        own: half-open ranges of `prompt` that the model sampled (anchors, completions of earlier turns), in order.
        decode: decodes ids to text, including special tokens.
        rendered: the template's rendering of the same messages, as text.
        written: for each range in `own`, the text in its place in `rendered`: the reply as the template writes it, with its end of turn if
            the range has one; or the sentinel that was rendered in its place.
        session: the session's name, for the violations.
    """
    if len(own) != len(written):
        return _of(session, [f"{len(own)} spans, and {len(written)} replies in the rendering"])
    found: list[str] = []
    at = start = 0
    for n, (begin, end) in enumerate([*own, (len(prompt), len(prompt))]):
        if not start <= begin <= end <= len(prompt):
            return _of(session, [*found, f"span {n} ({begin}, {end}) does not start after token {start} of {len(prompt)}"])
        glue = decode(prompt[start:begin]) if begin > start else ""
        reply = written[n] if n < len(written) else ""
        if not rendered.startswith(glue + reply, at):
            same = _same_head(glue + reply, rendered[at:])
            where = f"in the text before span {n}" if same < len(glue) else f"in the reply of span {n}"
            wants, has = rendered[at + same : at + same + 20], (glue + reply)[same : same + 20]
            return _of(
                session, [*found, f"tokens {start} to {begin}: {where}, at character {at + same}: {has!r}, the rendering has {wants!r}"]
            )
        at, start = at + len(glue) + len(reply), end
    if at != len(rendered):
        found.append(f"token {len(prompt)}: the prompt ends, the rendering continues with {rendered[at : at + 20]!r}")
    return _of(session, found)


def _same_head(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def trained_once(built: Sequence[TokenSequence], turns: Sequence[Turn], tokens: Mapping[str, Tokens], *, session: str = "") -> list[str]:
    """Check that the sequences together train each sampled token exactly once, and no other token.

    A trained token has loss mask 1, follows the prompt that it was sampled after, and has the log probability that it was sampled with. A
    turn without log probabilities cannot be trained: it must be marked `no-logprobs` and have mask 0. So have the tokens that were forced.
    """
    prompts, found = _prompts(turns, tokens)
    known = {turn.id: turn for turn in turns}
    claims = Counter(span.turn.id for sequence in built for span in sequence.turns)
    found += [f"turn {turn}: is in {claims[turn]} sequences" for turn in known if claims[turn] != 1]
    found += [f"turn {turn}: is in a sequence, and not recorded" for turn in claims if turn not in known]
    for sequence in built:
        free = bytearray(b"\x01" * len(sequence.loss_mask))
        for span in sequence.turns:
            start, end = span.completion
            free[start:end] = bytes(len(free[start:end]))
            if span.turn.id in prompts:
                found += _span(sequence, span, prompts[span.turn.id], tokens[span.turn.id])
        for i, mask in enumerate(sequence.loss_mask):
            if free[i] and (mask or any(sequence.logprobs[i : i + 1])):
                found.append(f"sequence {sequence.id}: token {i} was not sampled here, and has mask {mask} or a log probability")
    return _of(session, found)


def _span(sequence: TokenSequence, span: SequenceTurn, prompt: bytes, own: Tokens) -> list[str]:
    found = []
    start, end = span.completion
    where = f"sequence {sequence.id}, turn {span.turn.id}, tokens {start} to {end}"
    if sequence.token_ids[:start] != ids.unpack(prompt):
        found.append(f"{where}: comes after another prompt than it was sampled after")
    if sequence.token_ids[start:end] != ids.unpack(own.completion):
        found.append(f"{where}: not the tokens sampled")
    n = ids.count(own.completion)
    values = ids.unpack_logprobs(own.logprobs)
    trained = len(values) == n
    if not trained and TurnMark.NO_LOGPROBS not in span.turn.marks:
        found.append(f"{where}: {len(values)} log probabilities for {n} tokens, and the turn is not marked")
    if sequence.loss_mask[start:end] != (span.turn.chosen_mask() if trained else [0] * n):
        found.append(f"{where}: mask is not {int(trained)} throughout")
    if sequence.logprobs[start:end] != (values if trained else [0.0] * n):
        found.append(f"{where}: not the log probabilities sampled with")
    return found


def aligned(sequence: TokenSequence, *, session: str = "") -> list[str]:
    """Check that a sequence's three lists have the same length, and that the spans of its turns cover it in order and without gaps."""
    found = []
    sizes = (len(sequence.token_ids), len(sequence.loss_mask), len(sequence.logprobs))
    if len(set(sizes)) != 1:
        found.append(f"sequence {sequence.id}: {sizes[0]} tokens, {sizes[1]} mask entries, {sizes[2]} log probabilities")
    if set(sequence.loss_mask) - {0, 1}:
        found.append(f"sequence {sequence.id}: mask entries other than 0 and 1")
    at = 0
    for span in sequence.turns:
        where = f"sequence {sequence.id}, turn {span.turn.id}"
        (start, middle), (again, end) = span.prompt, span.completion
        if start != at or again != middle or not start <= middle <= end:
            found.append(f"{where}: prompt {span.prompt} and completion {span.completion} do not go on from token {at}")
        if (middle, end - again) != (span.turn.prompt_tokens, span.turn.completion_tokens):
            recorded = f"{span.turn.prompt_tokens} and {span.turn.completion_tokens} recorded"
            found.append(f"{where}: prompt ends at {middle}, completion has {end - again} tokens; {recorded}")
        at = end
    if at != sizes[0]:
        found.append(f"sequence {sequence.id}: its turns end at token {at} of {sizes[0]}")
    return _of(session, found)


def linear(turns: Sequence[Turn], tokens: Mapping[str, Tokens], *, session: str = "") -> list[str]:
    """Check that a turn that extends another stores only the tokens that it adds.

    So a session with a single line stores exactly as many ids as its last prefix has, whatever the number of turns.
    """
    prompts, found = _prompts(turns, tokens)
    known = {turn.id: turn for turn in turns}
    for turn in turns:
        parent = known.get(turn.parent or "")
        if turn.id not in prompts or parent is None:
            continue
        new = turn.prompt_tokens - parent.prompt_tokens - parent.completion_tokens
        stored = ids.count(tokens[turn.id].delta)
        if stored > new:
            found.append(f"turn {turn.id}: stores {stored} prompt tokens, {new} are new")
    return _of(session, found)


def anchored(turns: Sequence[Turn], tokens: Mapping[str, Tokens], *, session: str = "") -> list[str]:
    """Check that each anchor of a prompt has the ids that its turn sampled, from its offset on, and that anchors do not overlap."""
    prompts, found = _prompts(turns, tokens)
    for turn in turns:
        end = 0
        for anchor in turn.anchors if turn.id in prompts else ():
            where = f"turn {turn.id}: the anchor of turn {anchor.turn}, tokens {anchor.start} to {anchor.end},"
            source = tokens.get(anchor.turn)
            if not end <= anchor.start <= anchor.end <= turn.prompt_tokens or anchor.offset < 0:
                found.append(f"{where} is not between the one before and the end of the prompt")
            elif source is None or anchor.turn not in prompts:
                found.append(f"{where} names a turn that is not recorded")
            else:
                here = ids.head(ids.tail(prompts[turn.id], anchor.start), anchor.end - anchor.start)
                if here != ids.head(ids.tail(source.completion, anchor.offset), anchor.end - anchor.start):
                    found.append(f"{where} is not what that turn sampled from token {anchor.offset} on")
            end = max(end, anchor.end)
    return _of(session, found)


def apart(turns: Sequence[Turn], *, session: str = "") -> list[str]:
    """Check that no turn takes ids, context or stored tokens from a turn of another model."""
    known, found = {turn.id: turn for turn in turns}, []
    for turn in turns:
        for name in (turn.parent, turn.origin, turn.base, turn.context_base, *(anchor.turn for anchor in turn.anchors)):
            other = known.get(name or "")
            if other is not None and other.model != turn.model:
                found.append(f"turn {turn.id} of {turn.model}: refers to turn {other.id} of {other.model}")
    return _of(session, found)


def audit(turns: Sequence[Turn], tokens: Mapping[str, Tokens], *, session: str = "") -> list[str]:
    """Check all invariants that need only a session's records."""
    found = extension(turns, tokens, session=session)
    if found:
        return found
    built = sequences(turns, tokens)
    found += (
        linear(turns, tokens, session=session)
        + anchored(turns, tokens, session=session)
        + apart(turns, session=session)
        + trained_once(built, turns, tokens, session=session)
    )
    for sequence in built:
        found += aligned(sequence, session=session)
    return found


def _prompts(turns: Sequence[Turn], tokens: Mapping[str, Tokens]) -> tuple[dict[str, bytes], list[str]]:
    """Rebuild the packed prompt of every turn; also return the violations of turns that cannot be rebuilt."""
    prompts: dict[str, bytes] = {}
    found = []
    for turn in turns:
        own = tokens.get(turn.id)
        if own is None:
            found.append(f"turn {turn.id}: its tokens are missing")
            continue
        if turn.base is not None and turn.base not in prompts:
            found.append(f"turn {turn.id}: its base {turn.base} is not recorded before it")
            continue
        base = prompts[turn.base] + tokens[turn.base].completion if turn.base is not None else b""
        prompt = ids.head(base, turn.shared) + own.delta
        counts = (ids.count(prompt), ids.count(own.completion))
        if counts != (turn.prompt_tokens, turn.completion_tokens):
            found.append(f"turn {turn.id}: {counts} prompt and completion tokens, {(turn.prompt_tokens, turn.completion_tokens)} recorded")
        if turn.id in prompts:
            found.append(f"turn {turn.id}: recorded twice")
        prompts[turn.id] = prompt
    return prompts, found


def _of(session: str, found: Iterable[str]) -> list[str]:
    return [f"session {session}: {line}" if session else line for line in found]
