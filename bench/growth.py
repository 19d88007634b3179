"""Grows one session to 200 turns: does a turn cost more if more turns precede it?"""

from collections.abc import Sequence
from typing import Any

import redis

from bench.cost import SLOW, MeasuredSession, Rig, Sample, in_turn, parse_cost, summary
from bench.talk import Talk

TOKENS, TAIL = 200, 800
AROUND = 4
"""Number of turns on either side of a mark that are measured, too."""

MARKS = (10, 25, 50, 100, 150, 200)


def run_growth(rig: Rig, sessions: int, marks: Sequence[int] = MARKS) -> dict[str, Any]:
    """Grows sessions turn by turn, with 200 sampled and about 200 new tokens each, and measures the calls around each mark.

    Slow targets are called once at each mark.
    """
    found: dict[int, dict[str, list[Sample]]] = {mark: {name: [] for name in rig.targets} for mark in marks}
    bodies: dict[int, bytes] = {}
    rig.connect()
    before = stored(rig)
    tokens = 0
    usual = [name for name in rig.targets if name not in SLOW]
    for _ in range(sessions):
        played = MeasuredSession(rig, lambda seed: Talk(seed, size=1200, messages=2, mock_tokens=TOKENS))
        last = marks[-1] + AROUND
        for turn in range(1, last + 1):
            near = [mark for mark in marks if abs(turn - mark) <= AROUND]
            if near:
                body = played.body("direct")
                slow = [name for name in rig.targets if name in SLOW] if turn == near[0] else []
                for name, sample in played.look(in_turn(usual + slow, turn), TAIL).items():
                    found[near[0]][name].append(sample)
                if turn == near[0]:
                    bodies[turn] = body
            else:
                played.step(TAIL)
        for name in played.talks:
            rig.check(name, played.session, last - 1)
        info = rig.turns(next(name for name in played.talks if rig.targets[name].records), played.session)
        tokens += info[-1]["prompt_tokens"] + info[-1]["completion_tokens"]
    kept = stored(rig) - before
    return {
        "sessions": sessions,
        "tokens": tokens,
        "redis_bytes": kept,
        "redis_bytes_per_token": round(kept / tokens, 2) if kept else None,
        "marks": [
            {
                "turn": mark,
                "body_bytes": len(bodies[mark]),
                "targets": {name: summary(samples) for name, samples in found[mark].items() if samples},
                "parse_us": parse_cost(bodies[mark]),
            }
            for mark in marks
        ],
    }


def stored(rig: Rig) -> int:
    """Bytes that Redis reports for all its keys; 0 without Redis."""
    total = 0
    for target in rig.targets.values():
        for store in target.stores:
            with redis.Redis(port=store.port) as link:
                total += sum(link.memory_usage(key, samples=0) or 0 for key in link.scan_iter(count=1000))
    return total
