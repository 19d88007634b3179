"""The messages of every format over HTTP, for sessions in which harnesses edited their histories in all known ways.

`test_served` compares tokens with the ground-truth log of the engine. This module compares messages with the requests that it received.
"""

import asyncio

from atif import Trajectory

from tests.proxy.kit import proxied
from tests.proxy.traffic import Harness
from tests.trajectories.formats.schemas import GymMessages, GymResult, Trace
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.testing import SimulatedEngine


def told(messages):
    """The messages that the model received, without its own replies."""
    return [(m.role, m.content or "", m.answers) for m in map(read_message, messages) if m.role != "assistant"]


async def test_the_messages_of_a_row_are_those_that_the_engine_received():
    engine = SimulatedEngine(seed=5, drift=0.4)
    async with proxied(engine) as rig:
        harnesses = [Harness(rig, f"s{i}", 11) for i in range(4)]
        await asyncio.gather(*(harness.run(14) for harness in harnesses))
        bodies = {headers.get("X-Request-ID"): body for headers, body in zip(engine.headers, engine.requests, strict=True)}
        compared, starts = 0, set()
        for harness in harnesses:
            ground_truth = rig.ground_truth(harness.session)
            asked = {tuple(entry.prompt_ids): bodies[entry.request_id.removeprefix("chatcmpl-")]["messages"] for entry in ground_truth}
            formats = {
                name: await rig.get(f"/tokencache/v1/sessions/{harness.session}/trajectories?format={name}")
                for name in ("nemo-gym", "verifiers", "atif")
            }
            Trace.model_validate(formats["verifiers"])
            for trajectory in formats["atif"]["trajectories"]:
                Trajectory.model_validate(trajectory)
                assert trajectory["extra"]["wordless"] == []
            for row in formats["nemo-gym"]["responses"]:
                starts.add(row["tokencache"]["start"])
                GymResult.model_validate(row)
                GymMessages.validate_python(row["messages"])
                for at, message in enumerate(row["messages"]):
                    if "prompt_token_ids" in message:
                        assert told(row["messages"][:at]) == told(asked[tuple(message["prompt_token_ids"])])
                        compared += 1
        assert compared > 40
        assert starts == {"root", "branch", "resplice", "plain"}
