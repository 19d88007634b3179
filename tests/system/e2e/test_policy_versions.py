"""A real vLLM whose weights are replaced under sessions: versions of turns, and what was computed with which weights.

The reference is the engine itself with an empty cache: it scores the recorded ids under a salt of their own. In float32 its log
probabilities equal the recorded ones exactly if the weights are the same, and all keys and values are theirs.
"""

import asyncio
import contextlib

import pytest
from conftest import proxying
from rig.model import make_adapter, make_model
from rig.server import LIMIT_S, MODEL

from tokencache.core import ids
from tokencache.core.weights import MIXED
from tokencache.store.memory import MemoryStore

RULES = "Rules are many and each of them counts. " * 30
"""Longer than a block of the CPU's prefix cache (128 tokens)."""
WEIGHTS = "/tokencache/v1/weights"
APART = 1e-3


@contextlib.asynccontextmanager
async def proxy(weights_server, **settings):
    """A proxy before the engine with the weights `v1`, an empty cache and no pause."""
    async with proxying(weights_server.url, MemoryStore(), hold=LIMIT_S, **settings) as proxied:
        proxied.store, proxied.weights = proxied.proxy.store, {"v1": weights_server.model_dir, "v2": other_weights(weights_server)}
        await ask(proxied, weights_server.url, "/resume")
        await load(proxied, "v1")
        await ask(proxied, weights_server.url, "/reset_prefix_cache")
        await ask(proxied, weights_server.url, "/update_weight_version", new_version="default")
        await proxied.proxy.pool.monitors[0].check()
        yield proxied
        await ask(proxied, weights_server.url, "/update_weight_version", new_version="default")
        await ask(proxied, weights_server.url, "/resume")
        await load(proxied, "v1")
        await ask(proxied, weights_server.url, "/reset_prefix_cache")


def other_weights(server):
    """Weights of the same shape that differ by a tenth."""
    place = server.workdir / "v2"
    return place if place.exists() else make_model(server.tokenizer_dir, place, change=0.1)


async def ask(proxied, url, path, method="POST", **body):
    async with proxied.http.request(method, url + path, json=body) as answer:
        said = await (answer.json() if answer.content_type == "application/json" else answer.text())
        assert answer.status < 300, said
        return said


async def load(proxied, version):
    """Replace the weights in place, as a trainer does."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(proxied.weights[version])}}
    async with proxied.http.post(proxied.vllm + "/collective_rpc", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def announce(proxied, version):
    await ask(proxied, proxied.url, WEIGHTS, "PUT", version=version)


async def recorded(proxied, session="s"):
    """The session's turns, each with the ids of its prompt, those of its completion, and the log probabilities."""
    turns = await proxied.store.turns(session)
    found = []
    for turn in turns:
        prefix = (await proxied.proxy.ledger.prefixes.get(session, turn.id)).prefix
        tokens = (await proxied.store.tokens(session, [turn.id]))[turn.id]
        found.append((turn, ids.unpack(prefix.prompt), ids.unpack(tokens.completion), ids.unpack_logprobs(tokens.logprobs)))
    return found


async def cold(proxied, prompt, completion, model=MODEL):
    """The log probabilities of a completion by the engine as it is now, without anything cached."""
    salt = f"cold{next(COUNT)}"
    body = {"model": model, "prompt": prompt + completion, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt}
    choice = (await ask(proxied, proxied.vllm, "/v1/completions", **body))["choices"][0]
    scored = choice["prompt_logprobs"][len(prompt) :]
    return [entry[str(token)]["logprob"] for entry, token in zip(scored, completion, strict=True)]


COUNT = iter(range(10**6))


def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", ["exact", "session", "off"])
async def test_after_an_update_only_the_salt_of_the_version_gives_what_a_cold_engine_gives(weights_server, policy, figures):
    async with proxy(weights_server, kv=policy) as proxied:
        await announce(proxied, 1)
        harness = proxied.harness("s").say("EPISODE:hello " + RULES)
        await harness.turn()
        await load(proxied, "v2")
        await announce(proxied, 2)
        await harness.turn()
        await harness.turn()
        _, *later = await recorded(proxied)
        for turn, prompt, completion, logprobs in later:
            assert turn.versions == [{"version": "2", "start": 0, "end": turn.completion_tokens}]
            assert turn.prompt_version == ("2" if policy == "exact" else MIXED)
            assert ("hybrid-kv" in turn.marks) == (policy == "session")
            difference = apart(logprobs, await cold(proxied, prompt, completion))
            figures.append(f"--kv {policy}, after an update: log probabilities {difference:.2g} from a cold engine's")
            assert (difference == 0) if policy == "exact" else (difference > APART)


PAUSES = {"keep": ("keep", True), "keep, cache kept": ("keep", False), "wait": ("wait", True), "abort": ("abort", True)}


@pytest.mark.parametrize("name", PAUSES)
async def test_what_each_mode_of_a_pause_does_to_a_reply(weights_server, name, figures):
    """The tokens after the update against a cold engine with the new weights, those before it against one with the old."""
    mode, clear = PAUSES[name]
    async with proxy(weights_server) as proxied:
        await announce(proxied, 1)
        harness = proxied.harness("s").say("EPISODE:count " + RULES)
        await harness.turn()
        call = asyncio.create_task(harness.turn(stream=True))
        await asyncio.sleep(0)
        await until_sampled(proxied, 40, call)
        begun = await ask(proxied, proxied.url, f"{WEIGHTS}/update", mode=mode, clear_cache=clear)
        await load(proxied, "v2")
        await ask(proxied, proxied.url, f"{WEIGHTS}/update/{begun['id']}/finish", version=2)
        await call
        _, *turns = await recorded(proxied)
        new = [await cold(proxied, prompt, completion) for _, prompt, completion, _ in turns]
        await load(proxied, "v1")
        old = [await cold(proxied, prompt, completion) for _, prompt, completion, _ in turns]
        for (turn, _, _, logprobs), by_new, by_old in zip(turns, new, old, strict=True):
            figures.append(f"/pause?mode={name}: {turn.versions} {turn.marks}: last token {abs(logprobs[-1] - by_new[-1]):.2g} from v2")
            for span in turn.versions:
                start, end = span["start"], span["end"]
                known = {"1": by_old, "2": by_new}.get(span["version"])
                assert known is None or apart(logprobs[start:end], known[start:end]) == 0
        cut = turns[0][0]
        if name.startswith("keep"):
            assert cut.versions == [{"version": MIXED, "start": 0, "end": cut.completion_tokens}]
            assert apart(turns[0][3][:20], old[0][:20]) == 0
            late = apart(turns[0][3][-20:], new[0][-20:])
            assert (late == 0) if clear else (late > APART)
            assert ("stale-kv" in cut.marks) == (not clear)
        else:
            assert cut.versions[0]["version"] == "1"
            assert not {"mixed-weights", "stale-kv"} & set(cut.marks)


async def until_sampled(proxied, tokens, call):
    """Wait until the engine has sampled so many more tokens."""

    async def sampled():
        async with proxied.http.get(f"{proxied.vllm}/metrics") as answer:
            (line,) = [line for line in (await answer.text()).splitlines() if line.startswith("vllm:generation_tokens_total{")]
        return float(line.rpartition(" ")[2])

    before = await sampled()
    while await sampled() < before + tokens:
        assert not call.done()
        await asyncio.sleep(0.01)


async def test_an_adapter_that_is_reloaded_in_place_under_one_path(weights_server, tmp_path, figures):
    """Its name and path are its version. What is under that path cannot be seen: new values need an announcement."""
    async with proxy(weights_server) as proxied:
        place = tmp_path / "policy"

        async def adapter(seed):
            make_adapter(place, seed=seed)
            await ask(proxied, proxied.vllm, "/v1/load_lora_adapter", lora_name="policy", lora_path=str(place), load_inplace=True)

        await adapter(1)
        harness = proxied.harness("s", model="policy").say("EPISODE:hello " + RULES)
        await harness.turn()
        await adapter(2)
        await harness.turn()
        await announce(proxied, 2)
        await harness.turn()
        (first, *_), unseen, announced = await recorded(proxied)
        assert first.versions == [{"version": f"policy@{place}", "start": 0, "end": first.completion_tokens}]
        assert unseen[0].prompt_version == first.prompt_version == f"policy@{place}"
        stale, exact = [apart(entry[3], await cold(proxied, entry[1], entry[2], "policy")) for entry in (unseen, announced)]
        figures.append(f"adapter reloaded in place: {stale:.2g} from a cold engine's; announced: {exact:.2g}")
        assert stale > APART
        assert (announced[0].prompt_version, exact) == ("2", 0)


async def test_the_engines_own_label(weights_server):
    async with proxy(weights_server) as proxied:
        for version, label in (("v1", "one"), ("v2", "two")):
            await load(proxied, version)
            await ask(proxied, proxied.vllm, "/update_weight_version", new_version=label)
            await proxied.proxy.pool.monitors[0].check()
            await proxied.harness(label).say("EPISODE:hello").turn()
            ((turn, *_),) = await recorded(proxied, label)
            assert (turn.version_source, turn.prompt_version) == ("engine", label)
