"""What requests hold is counted exactly: within the limits, and nothing is left when they have ended."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache import metrics, request_memory
from tokencache.errors import MemoryFullError
from tokencache.request_memory import Holding, Owner, RequestMemory, machine_memory

MOST = 100
WHAT = ("body", "media", "reply")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 3), st.sampled_from(WHAT), st.integers(0, 70)),
        st.tuples(st.just("give"), st.integers(0, 3), st.sampled_from(WHAT), st.integers(0, 70)),
        st.tuples(st.just("belong"), st.integers(0, 3), st.sampled_from([Owner(), Owner("a"), Owner("a", True)]), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from(["returns", "raises", "is cancelled"]), st.just(0)),
    ),
    max_size=40,
)


def gauge():
    return {what: metrics.REGISTRY.get_sample_value("tokencache_request_memory_bytes", {"what": what}) for what in WHAT}


class Request:
    """A request, the task that serves it, and what it should hold."""

    def __init__(self, held):
        self.holding, self.owner, self.sizes = Holding(held), Owner(), Counter()
        self.ends = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self.serve())
        self.holding.keep(self.task)

    async def serve(self):
        if await self.ends == "raises":
            raise ValueError

    async def end(self, how):
        if how == "is cancelled":
            self.task.cancel()
        else:
            self.ends.set_result(how)
        await asyncio.gather(self.task, return_exceptions=True)
        await asyncio.sleep(0)


def wrong(held, requests, before):
    """List what is counted wrongly."""
    by_owner, by_what = Counter(), Counter()
    for request in requests:
        by_owner[request.owner] += request.sizes.total()
        by_what.update(request.sizes)
    found = [f"{owner!r} holds {held.of(owner)}, not {size}" for owner, size in by_owner.items() if held.of(owner) != size]
    found += [f"all hold {held.total}"] * (held.total != by_what.total())
    found += [f"the gauge of {what} has {gauge()[what] - before[what]}" for what in WHAT if gauge()[what] - before[what] != by_what[what]]
    found += ["a limit is passed"] * (held.total > held.most or any(held.of(owner) > held.share(owner) for owner in by_owner))
    return found + [f"{len(held._by_owner)} owners are known"] * (len(held._by_owner) > sum(1 for size in by_owner.values() if size))


async def run(steps):
    """Run some requests, and end them all. Returns what was counted wrongly at some time."""
    held, before = RequestMemory(MOST), gauge()
    requests = [Request(held) for _ in range(4)]
    found = []
    for step, number, what, size in steps:
        request = requests[number]
        try:
            if step == "take":
                request.holding.take(what, size)
                request.sizes[what] += size
            elif step == "give" and request.sizes[what] >= size:
                request.holding.give(what, size)
                request.sizes[what] -= size
            elif step == "belong":
                request.holding.belong_to(what)
                request.owner = what
            elif step == "end":
                await request.end(what)
                requests[number] = Request(held)
        except MemoryFullError:
            pass
        found += wrong(held, requests, before)
    for request in requests:
        await request.end("returns")
        request.sizes.clear()
    return found + wrong(held, requests, before)


@given(STEPS)
def test_what_is_taken_is_given_back_whatever_ends_a_request(steps):
    assert not asyncio.run(run(steps))


def unlimited(held, owner, what, size):
    held.total += size
    held._by_owner[owner] = held.of(owner) + size
    metrics.REQUEST_MEMORY[what].inc(size)


FAULTS = {
    "nothing is given back": (Holding, "_end", lambda *_: None),
    "a move is forgotten": (RequestMemory, "move", lambda *_: None),
    "there is no limit": (RequestMemory, "add", unlimited),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_a_wrong_count(monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    steps = [("take", 0, "body", 40), ("belong", 0, Owner("a"), 0), ("take", 0, "media", 40), ("end", 0, "is cancelled", 0)]
    assert asyncio.run(run(steps))


def test_one_owner_has_half_and_all_together_no_more_than_the_limit():
    held = RequestMemory(MOST)
    first, second, third = Holding(held), Holding(held), Holding(held)
    first.belong_to(Owner("a", True))
    second.belong_to(Owner("a", True))
    first.take("body", 30)
    with pytest.raises(MemoryFullError, match="hold 30 of 50 bytes"):
        second.take("reply", 21)
    second.take("reply", 20)
    third.take("media", 50)
    with pytest.raises(MemoryFullError, match="all requests together hold 100 of 100 bytes"):
        third.take("media", 1)
    with pytest.raises(MemoryFullError):
        third.belong_to(Owner("a", True))
    assert (held.total, held.of(Owner("a", True)), held.of(Owner())) == (100, 50, 50)
    third.belong_to(Owner("a"))  # a session with the name of a tenant is another owner


def test_a_session_without_a_tenant_has_less(monkeypatch):
    monkeypatch.setattr(request_memory, "MOST_OF_SESSION", 20)
    held = RequestMemory(MOST)
    session, tenant = Holding(held), Holding(held)
    tenant.belong_to(Owner("a", True))
    tenant.take("body", 50)
    with pytest.raises(MemoryFullError, match="session hold 0 of 20 bytes"):
        session.take("body", 21)


def test_one_body_always_fits():
    held = RequestMemory(10, least=64)
    Holding(held).take("body", 64)


@pytest.mark.parametrize(
    ("groups", "limits", "memory"),
    [
        ("0::/\n", {"memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "6000", "a/b/memory.max": "max"}, 6000),
        (
            "5:cpu:/a\n4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "7000", "memory/memory.limit_in_bytes": "9223372036854771712"},
            7000,
        ),
        ("0::/a\n", {}, None),
        (None, {}, None),
    ],
)
def test_the_memory_is_that_of_the_control_group_if_it_is_less(tmp_path, groups, limits, memory):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert machine_memory(tmp_path) == (memory or machine_memory(tmp_path / "nowhere"))
