"""Sessions to look at: one that a harness really made, with everything in it that makes a rollout split, and one that is long."""

import asyncio
import contextlib
import json
import random

import aiohttp

from tests.proxy.kit import echo, results, user
from tokencache.core import ids
from tokencache.core.context import Context, Raw, pack_context
from tokencache.core.messages import Message, ToolCall
from tokencache.core.outcome import Outcome
from tokencache.core.session import Labels, Reward, SessionSettings
from tokencache.core.turn import Tokens, Turn, hash_ids, hash_logprobs
from tokencache.store.base import Entry
from tokencache.testing import Fault, build_tokenizer

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> \u202eabc"
THINK = "<think>\nI look at the tests first — naïve café ☕.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "Bash", "arguments": %s}\n</tool_call>'
BASH = CALL % '{"command": "cd /work/repo && python -m pytest -q tests/test_api.py", "timeout": "120"}'
CUT = (
    "<think>\nThe error is in the parser: 日本語 text is cut in half.\n</think>\n\nThe parser cuts a character in half 🙂. I will fix it.\n"
)
EPISODES = {
    "fix": [
        f"{THINK}Let me look at the failing test.\n{BASH}",
        CUT + CALL % '{"command": "sed -i s/ascii/utf-8/ api.py"}',
        f"<think>\nRun it again.\n</think>\n\nAgain, all of them.\n{BASH}",
        f"<think>\nHostile words: {HOSTILE}\n</think>\n\nA file holds {HOSTILE}, and I leave it alone. ",
        "<think>\nok\n</think>\n\nAll done: the tests pass ☕.",
    ],
    "sub": [
        "<think>\nI only read.\n</think>\n\nThe code reads its configuration from three files.",
        "<think>\nok\n</think>\n\nNothing else.",
    ],
}
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": COMMAND}}]
MAIN = [{"role": "system", "content": "You are a careful engineer."}, user("EPISODE:fix the failing test, please.")]


def as_claude_says(message):
    """How Claude Code sends a call back: the change of folder is gone, the number is one."""
    said = echo(message)
    for call in said.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        given["command"] = given["command"].removeprefix("cd /work/repo && ")
        if "timeout" in given:
            given["timeout"] = int(given["timeout"])
        call["function"]["arguments"] = json.dumps(given)
    return said


async def lively(rig, session="rollout-7"):
    """A harness's session: a retry, a forgiven rewriting, a sub-agent, compaction, a reply put in the model's mouth, a broken reply."""
    path = f"/s/{session}/h/claude-code/v1/chat/completions"

    async def say(messages, **more):
        status, said = await rig.post(None, path, model="sim", messages=messages, **more)
        assert status == 200, said
        return said["choices"][0]["message"]

    history = list(MAIN)
    for turn in range(4):
        if turn == 1:
            await say(history, tools=TOOLS)  # an answer that is thrown away
        said = await say(history, tools=TOOLS)
        history += [as_claude_says(said), *results(said, "2 failed, 40 passed\n")]
    helper = [{"role": "system", "content": "You are a helper and only read."}, user("EPISODE:sub Where is the configuration?")]
    for _ in range(2):
        said = await say(helper)
        helper += [echo(said), user("Anything else?")]
    shorter = [{"role": "system", "content": "You are a careful engineer. Be brief."}, *history[1:]]
    said = await say(shorter, tools=TOOLS)
    await say([*shorter, echo(said), user("Thanks.")], tools=TOOLS)
    words = [dict(message) for message in helper]
    words[2]["content"] = "The code reads its configuration from 2 files, and one variable."
    await say(words)
    rig.engine.faults.append(Fault.close(after=3))
    async with rig.http.post(rig.url + path, json={"model": "sim", "messages": history, "tools": TOOLS, "stream": True}) as broken:
        with contextlib.suppress(aiohttp.ClientError):
            await broken.read()


async def delegating(rig, session="delegating"):
    """A harness whose clock is in its system prompt: a helper's answer returns as text, a call fails, the clock goes on."""
    rig.engine.replies.episodes = {**rig.engine.replies.episodes, **EPISODES}
    helper = [{"role": "system", "content": "You are a helper and only read."}, user("EPISODE:sub Where is the configuration?")]
    history = [{"role": "system", "content": "You are a careful engineer. It is 13:40:01."}, user("EPISODE:fix the failing test, please.")]
    history += [echo(said := await rig.say(session, history, tools=TOOLS)), *results(said)]
    answer = (await rig.say(session, helper))["content"]
    rig.engine.faults.append(Fault.answer(500, '{"error": {"message": "CUDA out of memory"}}'))
    assert (await rig.post(session, messages=[*helper, user("Sure?")]))[0] == 500
    history[-1]["content"] = answer
    history += [echo(said := await rig.say(session, history, tools=TOOLS)), *results(said)]
    history[0] = {"role": "system", "content": "You are a careful engineer. It is 13:41:07."}
    await rig.say(session, history, tools=TOOLS)


GROUP = "math-17"
ANSWERS = {  # by session: its replies, and its reward
    "math-17-a": (["<think>\nAdd them.\n</think>\n\nFirst I add 3 and 4.", "The answer is 7."], 1.0),
    "math-17-b": (["<think>\nAdd them.\n</think>\n\nFirst I add 3 and 4.", "The answer is 8."], 0.0),
    "math-17-c": (["<think>\nMultiply them.\n</think>\n\nFirst I multiply 3 and 4.", "The answer is 12."], -0.5),
    "math-17-d": (["<think>\nAdd them.\n</think>\n\nFirst I add 3 and 4.", "The answer is 7."], None),
}


async def group(rig):
    """Sessions of one prompt: some part in the first reply, some in the second, and two are equal."""
    for session, (replies, reward) in ANSWERS.items():
        rig.engine.replies.episodes = {**rig.engine.replies.episodes, "sum": replies}
        await rig.store.define(session, SessionSettings(), Labels(group=GROUP, tags=("math", "two words")))
        history = [user("EPISODE:sum What is 3 + 4?")]
        for _ in replies:
            _, response = await rig.post(None, f"/s/{session}/h/claude-code/v1/chat/completions", model="sim", messages=history, seed=1)
            said = response["choices"][0]["message"]
            history += [echo(said), user("Go on.")]
        if reward is not None:
            await rig.store.add_reward(session, Reward(reward))
    await rig.store.finish("math-17-a")
    await rig.store.define("math-17-none", SessionSettings(), Labels(group=GROUP))


RUN = "7f3a9c21"


async def run(store, groups=14, size=4, seed=5):
    """The sessions of a run, put straight into a store: groups that passed, missed, failed, run, and wait for members."""
    rng, failures = (
        random.Random(seed),
        [("engine", "upstream-down: connection refused"), ("sandbox", "the container was killed"), ("timeout", "")],
    )
    for group in range(groups):
        metadata, skill = {"group_size": size}, 0.15 + 0.7 * group / groups
        for member in range(size if group < groups - 1 else size - 2):
            session = f"task-{group:02d}-{member}"
            await store.define(session, SessionSettings(), Labels(f"{RUN}-task-{group:02d}", metadata, (f"run:{RUN}", "math")))
            fails = rng.random() < 0.12
            turns = rng.randint(1, 6)
            await _play(store, session, turns, version=str(3 + group // 4), rng=rng, open_call=group >= groups - 2 and member == 0)
            if group >= groups - 2 and member < 2:
                continue
            if fails:
                await store.finish(session, Outcome(*rng.choice(failures)))
                continue
            await store.finish(session)
            if not (group == 5 and member == 3):
                await store.add_reward(session, Reward(1.0 if rng.random() < skill else round(rng.random() * 0.6, 2)))
    retried = Labels(f"{RUN}-task-03", {"group_size": size, "retry_of": "task-03-0"}, (f"run:{RUN}", "math"))
    await store.finish("task-03-0", Outcome("sandbox", "the container was killed"))
    await store.define("task-03-0-again", SessionSettings(), retried)
    await _play(store, "task-03-0-again", 2, version="3", rng=rng)
    await store.finish("task-03-0-again")


async def _play(store, session, turns, *, version, rng, open_call=False):
    """Record turns that took seconds, each longer than the one before."""
    length = rng.randint(300, 900)
    for n in range(turns):
        begun = await store.begin(session, f"{session}-{n}", [])
        new, said = ids.pack([1] * length), ids.pack([2] * rng.randint(20, 220))
        turn = Turn(
            id=f"{session}-{n}", call=f"{session}-{n}", match="root" if not n else "plain", prompt_tokens=ids.count(new),
            completion_tokens=ids.count(said), prefix_hash=hash_ids(new + said), completion_hash=hash_ids(said), logprobs_hash=b"",
            served=Message("assistant", f"Answer {n} of {session}."), model="sim", dialect="chat", seconds=rng.uniform(0.2, 4),
            created=1_790_000_000.0, versions=[{"version": version, "start": 0, "end": ids.count(said)}], version_source="trainer",
        )  # fmt: skip
        await store.commit(session, begun.epoch, turn.call, [Entry(turn, Tokens(new, said))])
        length += rng.randint(100, 900)
    if open_call:
        await store.begin(session, f"{session}-open", [])


TEXT = "the parser reads a line and returns its value, 日本語 or not; café ☕ naïve = (x, y)\n    if value is None:\n        raise"


async def long(store, turns=200, tokens=100_000, branch_at=120):
    """A session with so many turns and tokens, put straight into a store; one turn in the middle was asked twice."""
    session, rng, tokenizer = "long", random.Random(1), build_tokenizer()
    words = TEXT.split(" ")
    each = tokens // turns
    prefix, messages, before = b"", 0, None
    begun = await store.begin(session, "c", ())
    for n in range(turns):
        for twin in range(1 + (n == branch_at)):
            text = [tokenizer.encode(" ".join(rng.choices(words, k=each))) for _ in range(2)]
            new, said = ids.pack(text[0][: each // 2]), ids.pack(text[1][: each - each // 2])
            whole = prefix + new + said
            logprobs = ids.pack_logprobs([-rng.expovariate(1.5) for _ in range(ids.count(said))])
            call = ToolCall(f"call_{n}", "Bash", json.dumps({"command": f"step {n}"}))
            turn = Turn(
                id=f"{n:06d}{'b' if twin else 'a'}{rng.randbytes(4).hex()}",
                call=f"call-{n}-{twin}",
                match="root" if not n else "branch" if twin else "continue",
                parent=before and before.id,
                base=before and before.id,
                shared=ids.count(prefix),
                prompt_tokens=ids.count(prefix + new),
                completion_tokens=ids.count(said),
                prefix_hash=hash_ids(whole),
                completion_hash=hash_ids(said),
                logprobs_hash=hash_logprobs(logprobs),
                served=Message("assistant", f"Step {n} of many.", calls=(call,)),
                position_key=n.to_bytes(16, "big"),
                finish_reason="tool_calls",
                model="sim",
                dialect="chat",
                messages=messages + (2 if before else 1),
                tools=1,
                context_base=before and before.id,
                context_shared=messages,
                created=1_790_000_000.0 + 7 * n + twin,
                seconds=2.5,
            )
            told = {"role": "tool", "tool_call_id": f"call_{n - 1}", "content": f"result of step {n - 1}\n"} if before else user("Go on.")
            sent = [{"role": "assistant", "content": before.served.content, "tool_calls": [_written(before)]}, told] if before else [told]
            asked = pack_context(Context([Raw(json.dumps(message).encode()) for message in sent]), before and before.served)
            await store.commit(session, begun.epoch, turn.call, [Entry(turn, Tokens(new, said, logprobs), (), asked)])
        prefix, messages, before = whole, turn.messages, turn
    await store.settle(session, begun.epoch, "c")


def _written(turn):
    (call,) = turn.served.calls
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def crowd(store, sessions):
    """So many sessions with nothing in them, every tenth under way."""
    for n in range(sessions):
        begun = await store.begin(f"batch-{n:05d}", "c", ())
        if n % 10:
            await store.settle(f"batch-{n:05d}", begun.epoch, "c")
        if not n % 1000:
            await asyncio.sleep(0)
