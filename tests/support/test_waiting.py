"""What waits for states in all other tests."""

import pytest

from tests.support import waiting


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE", 0.05)


async def test_the_answer_is_returned_as_soon_as_it_is_true():
    answers = iter([None, 0, "there"])
    assert await waiting.until(lambda: next(answers)) == "there"
    answers = iter([None, 0, "there"])
    assert waiting.block_until(lambda: next(answers)) == "there"


async def test_a_coroutine_function_is_awaited():
    answers = iter([[], ["turn"]])

    async def asked():
        return next(answers)

    assert await waiting.until(asked) == ["turn"]


async def test_what_never_happens_is_named_with_the_last_answer(impatient):
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for a turn; the last answer was \[\]"):
        await waiting.until(list, "a turn")
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for a turn; the last answer was \[\]"):
        waiting.block_until(list, "a turn")


async def test_a_condition_that_times_out_by_itself_is_not_taken_for_the_limit():
    def refused():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await waiting.until(refused)
