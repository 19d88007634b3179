"""Rollouts of every shape, made of turns, tokens and contexts alone, without an engine, a store or sockets.

A `Talk` is a session in progress; `call` lets the model answer a conversation. Its toy tokenizer behaves like real ones: template text has
one token for each character, sampled text one token for each pair of characters. So sampled text has other ids than the same text in a
template. `text` decodes both.

`SESSIONS` holds the records of one session of each shape, `ROLLOUTS` their rollouts. `of_forest` makes a rollout of any tree of turns
(`core.forest`), without messages.
"""

import json
from array import array

import msgspec

from tests.core.forest import Forest
from tokencache.core import ids
from tokencache.core.context import Context, Raw, pack_context
from tokencache.core.drift import Drift, Site
from tokencache.core.incidents import Incident
from tokencache.core.media import PlacedMedia
from tokencache.core.messages import Message, ToolCall
from tokencache.core.session import Labels, Reward
from tokencache.core.turn import Anchor, Turn, hash_logprobs
from tokencache.store.base import OpenCall, SessionInfo
from tokencache.trajectories.rollout import Records, Rollout, rollout

PAIR = 0x40000
"""Ids from this one on are pairs of characters; smaller ids are single ones. `BEGIN` and `END` belong to the template."""
BEGIN, END = 0x3FFF0, 0x3FFF1
MODEL = "qwen3"
CREATED = 1_790_000_000.0
SAMPLING = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    }
]


IMAGE = "\x01" * 6
"""What a prompt has for an image: six tokens."""


def single(value):
    """Round a number to float32."""
    return array("f", [value])[0]


def text(token_ids):
    """Decode ids."""
    names = {BEGIN: "<|begin|>", END: "<|end|>"}
    return "".join(names.get(one) or (chr((one - PAIR) >> 8) + chr((one - PAIR) & 255) if one >= PAIR else chr(one)) for one in token_ids)


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def result(call, content):
    return {"role": "tool", "tool_call_id": call, "content": content}


def written(served):
    """Write a reply as harnesses send it back: without reasoning, and with arguments in other spacing."""
    message = {"role": "assistant", "content": (served.content or "").strip() or None}
    if served.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(json.loads(c.arguments))}}
            for c in served.calls
        ]
    return message


def rendered(message):
    """Render a message as a chat template does: single characters."""
    content = message.get("content") or ""
    body = content if isinstance(content, str) else "".join(part["text"] if part["type"] == "text" else IMAGE for part in content)
    for call in message.get("tool_calls", ()):
        body += "<tool_call>" + json.dumps(call["function"]) + "</tool_call>"
    return [BEGIN, *map(ord, message["role"] + "\n" + body), END]


def sampled(served):
    """Tokenize a reply as the model samples it: pairs of characters, and the end of turn."""
    said = (f"<think>{served.reasoning}</think>" if served.reasoning else "") + (served.content or "")
    for call in served.calls:
        said += f'<tool_call>{{"name":"{call.name}","arguments":{call.arguments}}}</tool_call>'
    pairs = [PAIR + (ord(a) << 8) + ord(b) for a, b in zip(said[::2], said[1::2], strict=False)]
    return [*pairs, *map(ord, said[len(pairs) * 2 :]), END]


class Talk(Forest):
    """A session in progress: a forest of turns, each with the conversation that it answered."""

    def __init__(self, name="rollout-1"):
        super().__init__()
        self.name = name
        self.asked = {}
        self.contexts = {}
        self.incidents = []
        self.open_calls = []
        self.drift = {}

    def call(
        self,
        messages,
        content=None,
        *,
        calls=(),
        reasoning=None,
        after=None,
        origin=None,
        anchors=(),
        tools=(),
        match=None,
        cut=None,
        logprobs=None,
        marks=(),
        kept=True,
        choice_of=None,
        **more,
    ):
        """Answer a conversation, given with all its messages. Returns the id of the turn.

        `after` is the turn whose prefix the prompt starts with; `anchors` are turns whose replies stand, in their exact ids,
        in a respliced prompt in the order of the assistant's messages; `cut` leaves so many of the sampled tokens; of `choice_of`'s
        call this is the second choice; a turn that is not `kept` has no context.
        """
        name = f"t{len(self.turns)}"
        served = Message("assistant", content, reasoning, tuple(ToolCall(*one) for one in calls))
        completion = sampled(served)[:cut]
        prompt, places = self._prompt(messages, after, list(anchors))
        if logprobs is None:
            logprobs = [single(-0.1 * (i + 1) - len(self.turns)) for i in range(len(completion))]
        base = after or origin
        # a resplice, a plain turn and a root may share no messages with earlier turns: their context is stored whole
        shared = len(self.asked[after]) if after and self.contexts[after] and kept else 0
        self.add(
            prompt,
            completion,
            after,
            base=base,
            match=match,
            marks=marks,
            logprobs=logprobs,
            **{
                "origin": origin,
                "anchors": tuple(Anchor(turn, *at) for turn, at in zip(anchors, places, strict=True)),
                "served": served,
                "finish_reason": "length" if cut is not None else "tool_calls" if calls else "stop",
                "stopped": cut is None,
                "stop_reason": END if cut is None else None,
                "model": MODEL,
                "dialect": "chat",
                "messages": len(messages),
                "tools": len(tools),
                "sampling": SAMPLING,
                "replaced": {"temperature": 1.0, "seed": None},
                "logprob_kind": "raw" if logprobs else "",
                "versions": [{"version": "7", "start": 0, "end": len(completion)}],
                "context_base": after if shared else None,
                "context_shared": shared,
                "created": CREATED + len(self.turns),
                "seconds": 0.5,
                **more,
            },
        )
        if choice_of:
            self.change(name, call=choice_of, choice=1)
        self.asked[name] = list(messages)
        raw = [Raw(msgspec.json.encode(one)) for one in messages[shared:]]
        known = Raw(msgspec.json.encode(list(tools))) if tools and not shared else None
        self.contexts[name] = pack_context(Context(raw, known)) if kept else b""
        return name

    def _prompt(self, messages, after, anchors):
        """Return a whole prompt, or what is new in it after the prefix of a turn, and the ranges of the anchors."""
        begin = len(self.asked[after]) + 1 if after else 0
        prompt = list(map(ord, "\n")) if after else []
        places = []
        for message in messages[begin:]:
            if message["role"] == "assistant" and len(places) < len(anchors):
                turn = next(t for t in self.turns if t.id == anchors[len(places)])
                own = ids.unpack(self.tokens[turn.id].completion)
                prompt += [BEGIN, *map(ord, "assistant\n")]
                places.append((len(prompt), len(prompt) + len(own)))
                prompt += own
            else:
                prompt += rendered(message)
        return [*prompt, BEGIN, *map(ord, "assistant\n")], places

    def reply(self, turn):
        """The reply of a turn as its harness sends it back."""
        return written(next(t for t in self.turns if t.id == turn).served)

    def history(self, turn):
        """The conversation including the reply of a turn, as its harness sends it back."""
        return [*self.asked[turn], self.reply(turn)]

    def records(self, *, sealed=True):
        """The records that a store would have."""
        info = SessionInfo(self.name, CREATED, CREATED + 60, sealed, len(self.turns), tuple(self.open_calls), tuple(self.incidents))
        return Records(info, list(self.turns), dict(self.tokens), dict(self.contexts), (), dict(self.drift))


TASK = [system("You write code."), user("How many lines has a.py?")]


def linear():
    """One sequence of three turns: two with tools, then the answer. The drift of the second one is measured."""
    talk = Talk("linear")
    first = talk.call(TASK, "Let me look.", reasoning="I count them.", calls=[("c1", "bash", '{"cmd":"wc -l a.py"}')], tools=TOOLS)
    history = [*talk.history(first), result("c1", "wc: a.py: no such file")]
    calls = [("c2", "bash", '{"cmd":"ls"}'), ("c3", "bash", '{"cmd":"pwd"}')]
    second = talk.call(history, calls=calls, after=first, tools=TOOLS, applied_rules=("args-json", "reasoning-left-out"))
    history = [*talk.history(second), result("c2", "b.py"), result("c3", "/src")]
    talk.call(
        history, "There is no a.py.", reasoning="Only b.py.", after=second, tools=TOOLS, applied_rules=("args-json",), harness="hermes"
    )
    talk.drift[second] = Drift(120, 9, (Site(60, 69, (1, 2, 3), "retokenized", first),))
    return talk


def thrown_away():
    """A retry: the first answer of the second call was discarded, the session continued from the second answer."""
    talk = Talk("thrown-away")
    first = talk.call(TASK, calls=[("c1", "bash", '{"cmd":"wc -l a.py"}')], tools=TOOLS)
    history = [*talk.history(first), result("c1", "12 a.py")]
    talk.call(history, "Eleven.", after=first, tools=TOOLS)
    second = talk.call(history, "Twelve.", after=first, tools=TOOLS, match="branch")
    talk.call([*talk.history(second), user("Sure?")], "Yes, twelve.", after=second, tools=TOOLS)
    return talk


def sub_agent():
    """A main sequence that calls a sub-agent with a conversation of its own, and a title call without tools."""
    talk = Talk("sub-agent")
    talk.call([system("Give this a title."), user("How many lines has a.py?")], "Lines of a.py")
    main = talk.call(TASK, calls=[("c1", "agent", '{"task":"count"}')], tools=TOOLS * 2)
    helper = talk.call([system("You are a helper."), user("count")], calls=[("c2", "bash", '{"cmd":"wc -l a.py"}')], tools=TOOLS)
    helper = talk.call([*talk.history(helper), result("c2", "12 a.py")], "Twelve.", after=helper, tools=TOOLS)
    talk.call([*talk.history(main), result("c1", "Twelve.")], "It has twelve.", after=main, tools=TOOLS * 2)
    return talk


def respliced():
    """The system prompt was edited after the second turn: both replies keep their exact ids in a fresh rendering."""
    talk = Talk("respliced")
    first = talk.call(TASK, calls=[("c1", "bash", '{"cmd":"wc -l a.py"}')], tools=TOOLS)
    second = talk.call([*talk.history(first), result("c1", "12 a.py")], "Twelve.", after=first, tools=TOOLS)
    edited = [system("You write code, briefly."), *talk.history(second)[1:], user("And b.py?")]
    edge = {"origin": second, "anchors": (first, second), "match": "resplice", "reason": "context-edited"}
    third = talk.call(edited, calls=[("c2", "bash", '{"cmd":"wc -l b.py"}')], tools=TOOLS, **edge)
    talk.call([*talk.history(third), result("c2", "3 b.py")], "Three.", after=third, tools=TOOLS)
    return talk


def without_logprobs():
    """The second of three turns has no log probabilities: it is context, mask 0."""
    talk = Talk("without-logprobs")
    first = talk.call(TASK, "Which a.py?")
    second = talk.call([*talk.history(first), user("Mine.")], "I see.", after=first, marks=("no-logprobs",), logprobs=[])
    talk.call([*talk.history(second), user("Well?")], "Twelve.", after=second)
    talk.incidents.append(Incident("no-logprobs", call=second, turn=second, at=CREATED))
    return talk


def aborted():
    """The harness disconnected during a reply and continued without it. One call is still open."""
    talk = Talk("aborted")
    first = talk.call(TASK, "Which a.py?")
    history = [*talk.history(first), user("Mine.")]
    left = talk.call(history, "I shall count them, one by one.", after=first, cut=6, marks=("aborted",), finish_reason=None)
    talk.call([*history, user("Well?")], "Twelve.", after=first, match="branch")
    talk.incidents.append(Incident("client-gone", "left after 6 tokens", call=left, turn=left, at=CREATED))
    talk.open_calls.append(OpenCall("c-open", CREATED + 50))
    return talk


def cut_off():
    """The first reply reached the token limit, and the session continued. The weights changed during the second reply."""
    talk = Talk("cut-off")
    first = talk.call(TASK, "One, two, three, four, five, six.", cut=5)
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 6}]
    talk.call([*talk.history(first), user("Go on.")], "Ten lines.", after=first, versions=spans)
    return talk


def unrecognized():
    """The harness rewrote a reply: the engine rendered the prompt, and a new sequence began."""
    talk = Talk("unrecognized")
    talk.call(TASK, "Twelve.")
    talk.call([*TASK, {"role": "assistant", "content": "TWELVE"}, user("Sure?")], "Yes.", match="plain", reason="rewritten-reply")
    return talk


def choices():
    """One call with two choices. The session continued from the second one."""
    talk = Talk("choices")
    first = talk.call(TASK, "Twelve.")
    second = talk.call(TASK, "Which a.py?", choice_of=first)
    talk.call([*talk.history(second), user("Mine.")], "Twelve.", after=second)
    return talk


def media():
    """A turn with an image, whose messages are not kept, and a plain turn."""
    talk = Talk("media")
    talk.call([user("What is this?")], "A cat.", match="plain", reason="media", marks=("media",), kept=False)
    talk.call(TASK, "Twelve.")
    return talk


def pictures():
    """Images in a question and in a tool's result; the second turn continues the first."""
    talk = Talk("pictures")
    ask = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture("a"), {"type": "text", "text": "And this?"}]}
    first = talk.call([ask], "A cat.", calls=[("c1", "look", '{"x":1}')], tools=TOOLS, marks=("media",))
    seen = {"role": "tool", "tool_call_id": "c1", "content": [picture("b"), picture("a")]}
    second = talk.call([*talk.history(first), seen], "A dog.", after=first, tools=TOOLS, marks=("media",))
    tokens, media = [], []
    for turn, digests in ((first, "a"), (second, "ba")):
        tokens += ids.unpack(talk.tokens[turn].delta)
        pixels = [at for at, token in enumerate(tokens) if token == ord(IMAGE[0])][6 * len(media) :]
        media += [PlacedMedia("image", digest * 64, "image/png", at, 6) for digest, at in zip(digests, pixels[::6], strict=True)]
        talk.change(turn, media=tuple(media))
        tokens += ids.unpack(talk.tokens[turn].completion)
    return talk


def picture(digest):
    """A part of a stored message: an image, by reference."""
    return {"type": "image_url", "image_url": {"url": f"media:{digest * 64}"}}


def forced():
    """A thinking budget ended the thinking: within a reply, at its beginning, and at its end."""
    talk = Talk("forced")
    first = talk.call(TASK, "Twelve.", reasoning="I count and count")
    second = talk.call([*talk.history(first), user("Sure?")], "Yes.", after=first)
    talk.call([*talk.history(second), user("And b.py?")], None, reasoning="I count again", after=second, cut=5)
    for turn, spans in ((first, ((4, 6),)), (second, ((0, 1),)), ("t2", ((1, 2), (4, 5)))):
        values = ids.unpack_logprobs(talk.tokens[turn].logprobs)
        for start, end in spans:
            values[start:end] = [0.0] * (end - start)
        packed = ids.pack_logprobs(values)
        talk.change(turn, forced=spans, marks=("forced",), logprobs=packed, logprobs_hash=hash_logprobs(packed))
    return talk


def nothing_said():
    """The model ended its turn at once, and once sampled no token."""
    talk = Talk("nothing-said")
    first = talk.call(TASK, "")
    talk.call([*talk.history(first), user("Well?")], "", after=first, cut=0, finish_reason="abort")
    return talk


def speechless():
    """The harness disconnected before the first token."""
    talk = Talk("speechless")
    talk.call(TASK, "", cut=0, marks=("aborted",), finish_reason=None)
    talk.incidents.append(Incident("client-gone", at=CREATED, call="t0", turn="t0"))
    return talk


def empty():
    """A session without a call."""
    return Talk("empty")


def lost():
    """Only an incident is left: the store could not save the turn."""
    talk = Talk("lost")
    talk.incidents.append(Incident("store-error", "the store is down", hole=True, call="c9", at=CREATED))
    return talk


SESSIONS = {
    make.__name__.replace("_", "-"): make().records()
    for make in (
        linear,
        thrown_away,
        sub_agent,
        respliced,
        without_logprobs,
        aborted,
        cut_off,
        unrecognized,
        choices,
        media,
        pictures,
        forced,
        nothing_said,
        speechless,
        empty,
        lost,
    )
}
"""The records of a session of each shape, by name. Its function describes each."""

ROLLOUTS: dict[str, Rollout] = {name: rollout(records) for name, records in SESSIONS.items()}
"""The rollouts of `SESSIONS`."""


def torn():
    """Records that do not fit together: the prompt of a turn is shorter than recorded."""
    talk = linear()
    talk.change("t1", prompt_tokens=1)
    return rollout(talk.records())


REWARD = Reward(0.5, {"tests": 1.0, "style": -0.25}, {"t1": 0.125}, {}, CREATED)


def rewarded(made, **sequences):
    """A rollout with a reward of the session, of one turn, and of sequences, by their ids; and with labels."""
    labels = Labels("prompt-7", {"seed": 3}, ("nightly",))
    return msgspec.structs.replace(made, reward=msgspec.structs.replace(REWARD, sequences=sequences), labels=labels)


def of_forest(forest, name="forest"):
    """The rollout of any tree of turns, without messages. It must not be torn."""
    info = SessionInfo(name, CREATED, CREATED, True, len(forest.turns), (), ())
    made = rollout(Records(info, forest.turns, forest.tokens, {}))
    assert not made.incidents
    return made


def turn_of(made, name) -> Turn:
    """Find a turn of a rollout by its id."""
    return next(span.turn for sequence in made.sequences for span in sequence.turns if span.turn.id == name)
