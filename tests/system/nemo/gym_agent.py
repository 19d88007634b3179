"""An agent of NeMo Gym's kind: it calls a model server turn by turn, and keeps what comes back, as `simple_agent` does.

`carries` determines whether it sends back the members with token ids: Gym's own agents do, a harness that was not written for Gym drops
them. Either way `output` is the rollout's result: what was served, with all its members, and the results and user messages in between.
"""

import copy
import json
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.kit import CHAT, HEADER, TOOLS, assembled, events, user
from tests.system.nemo.worker import TOKEN_FIELDS

RESPONSES = "/v1/responses"
FUNCTIONS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]


def bare(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in TOKEN_FIELDS}


def carrying(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The test by which NeMo RL selects the items of a rollout (`_is_trainable_output_item`)."""
    return [entry for entry in entries if entry.get("generation_token_ids")]


@dataclass
class Agent:
    """One rollout; `base` is the URL before `/v1`."""

    rig: Any
    dialect: str = "chat"
    stream: bool = False
    carries: bool = True
    base: str = ""
    session: str = "s"
    history: list[dict[str, Any]] = field(default_factory=lambda: [user("EPISODE:demo")])
    output: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self, **members: Any) -> list[dict[str, Any]]:
        """Calls the model once and adds its reply; returns the message, or the items, as they were served."""
        served = await (self._chat(members) if self.dialect == "chat" else self._responses(members))
        self.output += served
        kept_items = [copy.deepcopy(entry) if self.carries else bare(entry) for entry in served]
        inputs = self._next_input(served)
        self.history += [*kept_items, *inputs]
        self.output += inputs
        return served

    async def run(self, turns: int = 4) -> list[dict[str, Any]]:
        for _ in range(turns):
            await self.turn()
        return self.output

    async def post(self, path: str, body: dict[str, Any]) -> tuple[str, str]:
        headers = {"Content-Type": "application/json"} | ({HEADER: self.session} if self.session else {})
        url = (self.base or self.rig.url) + path
        async with self.rig.http.post(url, data=json.dumps(body).encode(), headers=headers) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return answer.content_type, text

    async def _chat(self, members: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"model": "sim", "messages": self.history, "tools": TOOLS, "stream": self.stream, **members}
        kind, text = await self.post(CHAT, body)
        if kind != "text/event-stream":
            return [json.loads(text)["choices"][0]["message"]]
        chunks = [json.loads(line) for line in events(text)[:-1]]
        last = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
        fields = {name: value for name, value in last[0].items() if name in TOKEN_FIELDS}
        others = [name for chunk in chunks for c in chunk["choices"] if c["delta"] is not last[0] for name in c["delta"]]
        assert not set(others) & set(TOKEN_FIELDS)
        message = {name: value for name, value in assembled(chunks).items() if value or name == "content"}
        return [{**message, **fields}]

    async def _responses(self, members: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"model": "sim", "input": self.history, "tools": FUNCTIONS, "stream": self.stream, **members}
        kind, text = await self.post(RESPONSES, body)
        if kind != "text/event-stream":
            return json.loads(text)["output"]
        events = [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if part]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done  # a client that joins the items gets the same
        return done

    @staticmethod
    def _next_input(served: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The next input: results of the calls, or the user's next message."""
        if "type" not in served[0]:
            return [{"role": "tool", "tool_call_id": call["id"], "content": "a.txt\n"} for call in served[0].get("tool_calls") or ()] or [
                user("go on")
            ]
        calls = [item for item in served if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt\n"} for call in calls] or [user("go on")]
