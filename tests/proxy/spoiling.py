"""A gateway between the proxy and an engine that spoils the engine's answers, and a check of what is recorded of them."""

import copy
import json

from aiohttp import web

from tests.engine.intermediary import Intermediary

SAMPLING = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")


class SpoilingGateway(Intermediary):
    """Passes everything on. Answers to a session's requests that sample go through `spoil` once it is set.

    `spoil` gets the list of an answer's events, or its body as the only one, decoded where they are JSON; it returns the list to send.
    Bytes are sent as they are.
    """

    def __init__(self, upstream):
        super().__init__(upstream)
        self.spoil = None

    async def _pass(self, request):
        kept = {name: value for name, value in request.headers.items() if name.lower() not in {"host", "content-length"}}
        url = self.upstream + request.path
        async with self._http.request(request.method, url, data=await request.read(), headers=kept) as answer:
            raw = await answer.read()
            if self.spoil is not None and request.path in SAMPLING and "X-Session-ID" in kept and answer.status == 200:
                raw = self._spoiled(raw, stream=answer.content_type == "text/event-stream")
            passed = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-")}
            return web.Response(status=answer.status, body=raw, content_type=answer.content_type, headers=passed)

    def _spoiled(self, raw, *, stream):
        if not stream:
            (body,) = self.spoil([json.loads(raw)])
            return as_bytes(body)
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        sent = self.spoil([event if event == b"[DONE]" else json.loads(event) for event in events])
        return b"".join(b"data: %b\n\n" % as_bytes(event) for event in sent)


def as_bytes(event):
    return event if isinstance(event, bytes) else json.dumps(event, separators=(",", ":")).encode()


def place(document, path):
    """The container and the key of a member, by a dotted path."""
    *above, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for part in above:
        document = document[part]
    return document, last


def changed(document, path, change):
    """A copy with one member changed by a function; deleted if it returns `...`."""
    document = copy.deepcopy(document)
    container, key = place(document, path)
    value = change(container.get(key) if isinstance(container, dict) else container[key])
    if value is ...:
        del container[key]
    else:
        container[key] = value
    return document


def unproven(exported, truth):
    """What a session claims that the engine's ground-truth log does not say, as sentences; none of a session that says it has a hole.

    Each token with mask 1 must have been sampled there, and each generation must be recorded as a whole. Only a turn that says so may have
    mask 0.
    """
    if not exported["complete"]:
        return []
    log = [(list(entry.prompt_ids), list(entry.completion_ids), list(entry.logprobs)) for entry in truth]
    found = []
    for sequence in exported["sequences"]:
        mask = list(sequence["loss_mask"])
        for turn in sequence["turns"]:
            first, last = turn["completion"]
            bare = "no-logprobs" in turn["marks"] and not any(mask[first:last])
            for start, end in [(first + piece["start"], first + piece["end"]) for piece in turn["pieces"]] or [(first, last)]:
                own = sequence["token_ids"][:start], sequence["token_ids"][start:end], sequence["logprobs"][start:end]
                entry = next((one for one in log if one == own or (bare and one[:2] == own[:2])), None)
                if entry is None:
                    found.append(f"turn {turn['turn']}: the engine did not sample these {end - start} tokens with these log probabilities")
                else:
                    log.remove(entry)
            mask[first:last] = [0] * (last - first)
        if any(mask):
            found.append(f"sequence {sequence['id']}: tokens outside of its turns are trained")
    return [*found, *(f"no turn records the {len(entry[1])} tokens of a generation" for entry in log)]
