"""A request means the same to the proxy and to vLLM: odd requests, read by the proxy and by vLLM 0.32's own models.

Each request that vLLM accepts is refused by the proxy, or

* the proxy takes it for what vLLM takes it for (`differences`), and
* what it sends to the engine is read as the client's own request, apart from the members that the proxy sets (`SET_BY_PROXY`).

A request that vLLM refuses is refused by the proxy or by the engine: nothing is sampled that a direct call would not have sampled.

How vLLM reads members that are not of their JSON type: FastAPI decodes the body with Python's `json` and validates it with pydantic in lax
mode (https://docs.pydantic.dev/latest/concepts/conversion_table/). Then

    a whole number      may be written as `2`, `2.0`, `true`, `"2"`, `"2.0"`, `" 2"` or `"1_0"`; not as `2.5` or NaN
    a number            may be written as `true`, `"0.5"`, `NaN` or `"nan"`, too
    true and false      may be written as 1, 0, 1.0, -0.0, and `"true"`, `"t"`, `"yes"`, `"y"`, `"on"`, `"1"` and their opposites in any
                        case; some checks come before that, and take `"false"` for true
    text, lists         have their own types; JSON within a text is not decoded
    null                only where the member allows it: `n` in chat, but not `n` in text completions

A list of prompts is one prompt of ids if it can be read as one: `["1", 2]` and `[1.0, true]` are `[1, 2]` and `[1, 1]`.
"""

import base64
import json
import math
import os
import subprocess
from typing import NamedTuple

import msgspec
import pytest
from odd_requests import CHAT, COMPLETIONS, JSON, MESSAGES, RESPONSES, TOKENIZE, Odd, odd_requests
from rig.server import HERE, default_venv

from tests.support.reading import read_chat, read_tokenize
from tokencache.core import ids, strict_json
from tokencache.dialects import text_completions
from tokencache.dialects.base import DialectRequest, ModelCall, ServedModel
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.sampling import BUDGET, recorded
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.dialects.registry import dialect_of
from tokencache.dialects.stream_usage import HiddenUsage
from tokencache.engine.drivers.base import ExactPrompt, LastReply
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.prefixes import can_be_named
from tokencache.errors import HarnessError
from tokencache.proxy.continuation import limits_of, reason_against, remaining_fields

IDS = [7, 7, 7]
PROMPT = ExactPrompt(ids.pack(IDS), ids.Fragment.of(ids.pack(IDS)), LastReply(0, 0, 0))
SET_BY_PROXY = {"return_token_ids", "return_weight_versions", "logprobs", "include_reasoning", "stream_options", "kv_transfer_params"}


ENOUGH = 150
"""So many requests, at least, reach each comparison; the others are refused."""


class Taken:
    """What the proxy takes a request for, or why it refuses it; and what it sends to the engine."""

    def __init__(self, odd):
        self.odd, self.call, self.text, self.refused = odd, None, None, ""
        self.sent = []
        try:
            self._read()
        except HarnessError as why:
            self.refused = str(why)

    def _read(self):
        path, body = self.odd.path, self.odd.body
        if path == COMPLETIONS:
            text = text_completions.read(body)
            text_completions.unrecorded(text.fields)  # may refuse it, too
            self.text = text
            self.sent = [Odd(COMPLETIONS, text_completions.for_engine(self.text), self.odd.kind)]
            return
        if path == TOKENIZE:
            self.call = read_tokenize(body, IncrementalParser())
            return
        if path == CHAT:
            self.call = read_chat(body, IncrementalParser())
        else:
            parsed = run(dialect_of("POST", path, {}).parse(request_of(path, body)))
            self.call = read_chat(parsed.body, IncrementalParser()) if isinstance(parsed, ModelCall) else None
        if self.call is not None:
            kind = self.odd.kind if path == CHAT else JSON
            written = [Vllm().write(self.call, None)] + [Vllm().write(self.call, PROMPT)] * self.supplies_ids
            self.sent = [Odd(CHAT, body, kind) for body in written]

    @property
    def supplies_ids(self):
        """Whether the proxy may supply the ids of the prompt of this call."""
        return self.call.conversation is not None and not self.call.plain and not self.call.media


def run(work):
    """Run a coroutine that never waits."""
    try:
        while True:
            work.send(None)
    except StopIteration as done:
        return done.value


def request_of(path, body):
    async def served():
        return [ServedModel("sim")]

    async def documents(names):
        return [None for _ in names]

    async def forget(_name):
        return False

    more = {"handle": "0" * 32, "served": served, "documents": documents, "forget": forget}
    return DialectRequest(method="POST", path=path, query={}, headers={}, body=body, **more)


def read_by_vllm(requests):
    """What vLLM reads in each request: one process for all, because its imports take longest."""
    lines = [json.dumps({"path": odd.path, "type": odd.kind, "body": base64.b64encode(odd.body).decode()}) for odd in requests]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [str(default_venv().absolute() / "bin/python"), str(HERE / "read_requests.py")],
        env=os.environ | quiet | {"OMP_NUM_THREADS": "1"},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def same(one, other):
    """Whether two decoded values are equal: true is not 1; -0.0 is 0 and 2.0 is 2, as for every computation with them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def identical(one, other):
    """Whether a template shows two decoded values alike: 1.0 is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def differences(taken, held):
    """Compare what the proxy takes a request for with what vLLM holds; returns the names of what differs, with both values."""
    if taken.text is not None:
        facts = text_facts(taken.text, held)
    elif taken.odd.path == TOKENIZE:
        facts = tokenize_facts(taken.call, held)
    elif taken.odd.path == CHAT:
        facts = chat_facts(taken.call, held) | conversation_facts(taken, held)
    else:
        facts = translated_facts(taken.call, held, taken.odd.path)
    return {name: (took, holds) for name, (took, holds) in facts.items() if not same(took, holds)}


def sampled_facts(fields, recorded, held):
    """Members that are recorded, and those that a continuation of the reply reduces."""
    as_held = {name: value for name, value in recorded.items() if value is not None and name not in AS_SENT}
    facts = {f"sampling.{name}": (value, held.get(name)) for name, value in as_held.items()}
    if recorded.get(BUDGET) == -1:  # no budget, for which vLLM holds null
        facts[f"sampling.{BUDGET}"] = (None, held[BUDGET])
    if isinstance(stop := recorded.get("stop"), str) and stop[:1] == '"':  # a lone surrogate is recorded as it was written
        facts["sampling.stop"] = (json.loads(stop), held["stop"])
    if reason_against(fields) == "":
        rest = {name: msgspec.json.decode(raw) for name, raw in remaining_fields(fields, 1, 1).items() if name in LIMITS}
        facts |= {f"rest.{name}": (rest[name], held[name] - 1) for name in LIMITS if (held.get(name) or 0) > 0}
        facts |= {f"harmless.{name}": (True, held.get(name) in good) for name, good in HARMLESS.items()}
        facts["harmless.tool_choice"] = (True, not isinstance(held.get("tool_choice"), dict) and held.get("tool_choice") != "required")
    return facts


AS_SENT = {
    "tool_choice",
    "vllm_xargs",
    "response_format",
    "structured_outputs",
    "repetition_detection",
    "watermarking",
    "logits_processors",
}
"""Objects and lists that are recorded as they were sent; vLLM holds them with their defaults."""
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
HARMLESS = {
    "n": [None, 1],
    "presence_penalty": [None, 0],
    "frequency_penalty": [None, 0],
    "bad_words": [None, []],
    "stop": [None, [], ""],
    "use_beam_search": [False],
    "echo": [None, False],
    "continue_final_message": [None, False],
    "prompt_logprobs": [None],
    "repetition_detection": [None],
    "structured_outputs": [None],
    "length_penalty": [1.0],
}
"""Values with which a reply that was cut off can be continued."""


def chat_facts(call, held):
    fields, options = call.fields, held["stream_options"] or {}
    args, generates = call.as_written()
    facts = {
        "model": (call.model, held["model"] or ""),
        "n": (call.n, 1 if held["n"] is None else held["n"]),
        "stream": (call.stream, bool(held["stream"])),
        "ids": (call.shows_ids, bool(held["return_token_ids"])),
        "logprobs": (call.shows_logprobs, bool(held["logprobs"])),
        "reasoning": (call.shows_reasoning, held["include_reasoning"]),
        "hides usage": (HiddenUsage(fields)._hides, bool(held["stream"]) and not options.get("include_usage")),
        "limits": (limits_of(fields), {name: held[name] for name in LIMITS[:2] if held[name] is not None}),
        "generation prompt": (generates, held["add_generation_prompt"]),
        "no tools shown": ("tool_choice" in args.chat, bool(held["tools"]) and held["tool_choice"] == "none"),
        "tools": (call.tool_count, held["tools"]),
        "one call": (bytes(fields.get("parallel_tool_calls", b"")) == b"false", held["parallel_tool_calls"] is False),
    }
    kwargs = dict(held["chat_template_kwargs"] or {})
    if held["documents"] is not None:
        kwargs["documents"] = held["documents"]
    if held["reasoning_effort"] is not None:
        kwargs["reasoning_effort"] = held["reasoning_effort"]
        kwargs.setdefault("enable_thinking", held["reasoning_effort"] != "none")
    facts["template arguments"] = (True, identical(dict(args.kwargs), kwargs))
    others = {name: msgspec.json.decode(raw) for name, raw in args.members.items()}
    for name in ("chat_template", "mm_processor_kwargs"):
        facts[name] = (True, identical(others.get(name), held[name]))
    facts["add_special_tokens"] = (others.get("add_special_tokens", False), held["add_special_tokens"])
    unusable = held["echo"] or held["continue_final_message"] or held["truncate_prompt_tokens"] not in {None, -1}
    if unusable or not held["add_generation_prompt"]:
        facts["plain"] = (bool(call.plain), True)
    if held["echo"] or held["truncate_prompt_tokens"] is not None or not held["add_generation_prompt"]:
        facts["named"] = (can_be_named(call), False)
    return facts | sampled_facts(fields, recorded(call.fields), held)


def shown_text(message):
    """The text of a message as a template of strings shows it: the names of tools that it refers to are a part of it."""
    if not message.media:
        return message.content or ""
    return "\n".join(part if isinstance(part, str) else part["name"] for part in msgspec.json.decode(message.media))


def conversation_facts(taken, held):
    call = taken.call
    if not taken.supplies_ids:
        return {}
    facts = {"media": (False, held["media"])}
    if (parsed := held.get("conversation")) is None:
        return facts
    for index, (raw, theirs) in enumerate(zip(call.raw_messages, parsed, strict=True)):
        ours = read_message(msgspec.json.decode(raw))
        role = "system" if theirs["role"] == "developer" else theirs["role"]
        facts[f"{index}.role"] = (ours.role, role)
        facts[f"{index}.content"] = (shown_text(ours), theirs["content"])
        if role == "assistant":
            facts[f"{index}.reasoning"] = (ours.reasoning or "", theirs.get("reasoning") or "")
            names = [call["function"]["name"] for call in theirs.get("tool_calls") or ()]
            facts[f"{index}.calls"] = ([one.name for one in ours.calls], names)
        if role == "tool":
            facts[f"{index}.answers"] = (ours.answers, theirs.get("tool_call_id"))
    return facts


def text_facts(text, held):
    facts = {
        "model": (text.model, held["model"] or ""),
        "stream": (text.stream, bool(held["stream"])),
        "choices": (text.n, held["n"] * held["prompts"]),
        "ids": (text.shows_ids, bool(held["return_token_ids"])),
        "logprobs": (text.shows_logprobs, held["logprobs"] is not None),
        "unrecorded": (
            bool(text_completions.unrecorded(text.fields)),
            bool(held["echo"] or held["use_beam_search"] or held["prompt_embeds"] is not None),
        ),
        "hides usage": (
            HiddenUsage(text.fields)._hides,
            bool(held["stream"]) and not (held["stream_options"] or {}).get("include_usage"),
        ),
    }
    if held["prompt_embeds"] == []:  # vLLM ignores it; the proxy does not record it
        del facts["unrecorded"]
    return facts | sampled_facts(text.fields, recorded(text.fields), held)


def tokenize_facts(call, held):
    facts = {"kind": (call is not None and held["kind"] != "TokenizeChatRequest", False)}
    if call is not None:
        facts["generation prompt"] = (call.as_written()[1], held["add_generation_prompt"])
        kwargs = msgspec.json.decode(call.fields.get("chat_template_kwargs", b"null"))
        facts["template arguments"] = (True, identical(kwargs, held["chat_template_kwargs"]))
        if held["continue_final_message"] or not held["add_generation_prompt"]:
            facts["plain"] = (bool(call.plain), True)
    return facts


def translated_facts(call, held, path):
    limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
    return {
        "model": (call.model, strict_json.replace_surrogates(held["model"] or "")),
        "stream": (call.stream, bool(held["stream"])),
        "n": (call.n, 1),
        "beam search": ("use_beam_search" in call.fields, False),
        "limit": (next(iter(limits_of(call.fields).values()), None), held[limit]),
        **{name: (recorded(call.fields).get(name), held[name]) for name in ("temperature", "top_p", "top_k")},
    }


def changes(held, sent):
    """Compare what vLLM reads in a client's request with what it reads in the proxy's; returns what differs without need."""
    if "refused" in sent:
        return {"refused": (sent["refused"], "")}
    found = {name: (sent.get(name), value) for name, value in held.items() if name not in SET_BY_PROXY and not same(sent.get(name), value)}
    asked = {
        "ids": sent["return_token_ids"],
        "logprobs": sent["logprobs"] is not None and sent["logprobs"] is not False,
        "reasoning": sent.get("include_reasoning", True),
    }
    if sent["stream"]:
        asked["usage"] = (sent["stream_options"] or {}).get("include_usage")
    return found | {name: (given, True) for name, given in asked.items() if not given}


class Reading(NamedTuple):
    """A request: what the proxy takes it for, what vLLM holds, and what vLLM holds of each request that the proxy sends for it."""

    taken: Taken
    held: dict
    sent: list

    @property
    def refused(self):
        return "refused" in self.held


@pytest.fixture(scope="module")
def readings():
    """All odd requests, read by both."""
    taken = [Taken(odd) for odd in odd_requests()]
    found = iter(read_by_vllm([odd for one in taken for odd in (one.odd, *one.sent)]))
    return [Reading(one, next(found), [next(found) for _ in one.sent]) for one in taken]


def accepted(readings, *paths):
    """The requests of some routes that both accept. A request that the proxy relays to the engine has no call."""
    of_paths = [one for one in readings if one.taken.odd.path in paths]
    return [one for one in of_paths if not one.refused and (one.taken.call is not None or one.taken.text is not None)]


def shown(found, most=20):
    """The first of many findings."""
    return "\n".join(f"{odd.path} {odd.body[:300]} {odd.kind}: {what}" for odd, what in found[:most]) + f"\n{len(found)} in all"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE, MESSAGES, RESPONSES])
def test_both_read_the_same(readings, path):
    both = accepted(readings, path)
    assert len(both) > ENOUGH
    found = [(one.taken.odd, unlike) for one in both if (unlike := differences(one.taken, one.held))]
    assert not found, shown(found)


def test_the_engine_reads_in_the_proxys_request_what_it_would_read_in_the_clients(readings):
    both = [
        one
        for one in accepted(readings, CHAT, COMPLETIONS)
        if one.taken.text is None or not text_completions.unrecorded(one.taken.text.fields)
    ]
    found = [(one.taken.odd, unlike) for one in both for sent in one.sent if (unlike := changes(one.held, sent))]
    assert not found, shown(found)


def test_the_engine_refuses_what_it_would_refuse_from_the_client(readings):
    """In the other dialects the proxy is the server: it accepts some requests that vLLM's own routes refuse.

    And with exact ids, calls in a history that vLLM refuses are replaced on purpose (`with_stand_ins`), so that the session can go on.
    """
    refused = [one for one in readings if one.refused and one.taken.odd.path in {CHAT, COMPLETIONS}]
    sent = [(one, sent) for one in refused for sent in (one.sent[:1] if one.taken.call and one.taken.call.malformed else one.sent)]
    found = [(one.taken.odd, one.held) for one, theirs in sent if "refused" not in theirs]
    assert len(refused) > ENOUGH
    assert not found, shown(found)


def test_the_engine_uses_the_ids_that_the_proxy_supplies(readings):
    both = [one for one in accepted(readings, CHAT) if one.taken.supplies_ids]
    found = [
        (one.taken.odd, one.sent[1]["kv_transfer_params"]) for one in both if one.sent[1]["kv_transfer_params"]["prompt_token_ids"] != IDS
    ]
    assert len(both) > ENOUGH
    assert not found, shown(found)


def keep(*_args, **_more):
    """Leaves the members of a request as they are written."""


@pytest.mark.parametrize(
    ("where", "wrong", "found"),
    [
        (
            "tokencache.dialects.chat.request.normalize",
            keep,
            {"limits", "one call", "add_special_tokens", "sampling.temperature", "rest.max_tokens"},
        ),
        ("tokencache.dialects.text_completions.normalize", keep, {"sampling.temperature", "sampling.max_tokens"}),
        ("tokencache.dialects.text_completions._number_of_prompts", lambda _fields: 1, {"choices"}),
        ("tokencache.dialects.chat.rendering.value_of", bytes, {"no tools shown"}),
        ("tokencache.dialects.chat.vocabulary._MEDIA_MEMBERS", frozenset(), {"media"}),
        ("tokencache.dialects.chat.request.resolve_model", lambda *_: "another", {"model"}),
    ],
)
def test_a_reader_that_differs_is_found(readings, monkeypatch, where, wrong, found):
    monkeypatch.setattr(where, wrong)
    names = set()
    for one in accepted(readings, CHAT, COMPLETIONS):
        try:
            taken = Taken(one.taken.odd)
        except ValueError:
            continue
        if taken.call is not None or taken.text is not None:
            names.update(differences(taken, one.held))
    assert found <= names
