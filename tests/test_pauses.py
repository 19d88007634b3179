"""Long work is divided, and many long works take turns."""

import asyncio

import pytest

from tests.support.waiting import PATIENCE
from tokencache.pauses import LARGE, MESSAGES, parts_of, pause


async def test_in_each_turn_of_the_loop_one_pause_ends_in_order() -> None:
    turns, turn = list[tuple[int, str]](), 0

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def work(name: str) -> None:
        for _ in range(3):
            await pause()
            turns.append((turn, name))

    counting = asyncio.create_task(count())
    await asyncio.gather(*map(work, "abcd"))
    counting.cancel()
    assert [name for _, name in turns] == [*"abcd"] * 3
    assert len({turn for turn, _ in turns}) == len(turns), "two went on in one turn"


async def test_a_cancelled_pause_holds_up_no_other() -> None:
    waiting = [asyncio.create_task(pause()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, False, True]
    await pause()


@pytest.mark.parametrize(
    "sizes", [[], [5], [5] * 32, [5] * 33, [5] * 1000, [LARGE * 3], [LARGE // 3] * 7, [5] * 40 + [LARGE] * 3 + [5] * 40, [LARGE + 1] * 3]
)
def test_parts_are_all_messages_in_order_and_none_is_long(sizes: list[int]) -> None:
    messages = [bytes([place % 256]) * size for place, size in enumerate(sizes)]
    parts = parts_of(messages)
    assert [message for part in parts for message in part] == messages
    assert max(map(len, parts)) <= MESSAGES
    assert all(len(part) == 1 or sum(map(len, part)) <= LARGE for part in parts if part)
