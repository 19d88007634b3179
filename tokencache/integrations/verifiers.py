"""An environment for verifiers, and so for prime-rl, in which any harness runs through tokencache.

verifiers relays the calls of a harness to an endpoint, but only its renderer client records token ids, and that client serves one dialect
and samples through another route. Here the endpoint is the proxy. The session has the id of the trace as its name. When the rollout has
been scored, the environment stores the reward at the proxy and replaces the messages of the trace by the proxy's: the same conversation
with the token ids, log probabilities and masks that prime-rl trains on.

    # my_tasks/__init__.py: the package of the taskset also exports the environment
    from tokencache.integrations.verifiers import TokencacheEnv
    __all__ = ["MyTaskset", "TokencacheEnv"]

    tokencache serve --upstream http://127.0.0.1:8000 --session-from header:X-Session-ID

For an environment of your own, call `record` in its `finalize`. `docs/integrations/verifiers.md` has the complete setup. Source: verifiers
0.4.0, `verifiers/v1/env.py` (`Env.finalize`), `verifiers/v1/trace.py` (`Trace`), `verifiers/v1/clients/eval.py` (`EvalClient`).
"""

import os

from pydantic import model_validator

from tokencache.client import AsyncClient, AsyncSession, NotFoundError
from tokencache.core.outcome import OutcomeKind
from tokencache.core.turn import TurnMark
from tokencache.integrations.rollouts import delete_read, finish_scored

try:
    import verifiers.v1 as vf
    from verifiers.v1.clients.client import SESSION_ID_HEADER
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tokencache.integrations.verifiers runs inside verifiers (0.4.0): {error}. pip install verifiers", name=error.name
    ) from error

__all__ = ["TokencacheEnv"]

_OUTCOMES = {
    "ProviderError": OutcomeKind.ENGINE,
    "InterceptionError": "interception",
    "TunnelError": "interception",
    "SandboxError": OutcomeKind.SANDBOX,
    "ToolsetError": OutcomeKind.SANDBOX,
    "TaskError": "task",
}
"""The outcomes of verifiers' errors (`verifiers/v1/errors.py`); of all others `harness`."""


class TokencacheEnvConfig(vf.SingleAgentEnvConfig):
    """The settings of `SingleAgentEnv`, and the proxy.

    Unless `agent.client` is set, the agent's calls go to the proxy.
    """

    agent: vf.AgentConfig = vf.AgentConfig()
    proxy: str = "http://127.0.0.1:8100"
    """The URL of the proxy."""
    admin_key_var: str = "TOKENCACHE_ADMIN_KEY"
    """The environment variable with the proxy's admin key."""
    idle_timeout: float = 60.0
    """Seconds to wait for calls that are still in flight when the rollout has been scored."""
    delete: bool = False
    """Delete each session from the proxy once its trace is complete. If false, sessions stay until they expire."""

    run: str = ""
    """The id of the run, with which the names of its groups begin. The processes of a run need the same one, so it has no default."""

    @model_validator(mode="after")
    def _send_calls_to_the_proxy(self) -> "TokencacheEnvConfig":
        if self.agent.client is None:
            # The proxy needs no key: the header names the session. A named variable keeps Prime's own key out of it.
            client = vf.EvalClientConfig(base_url=f"{self.proxy.rstrip('/')}/v1", api_key_var="TOKENCACHE_SESSION_KEY")
            self.agent = self.agent.model_copy(update={"client": client})
        return self


class TokencacheEnv(vf.SingleAgentEnv, vf.Env[TokencacheEnvConfig]):
    """`SingleAgentEnv` with traces that have token ids."""

    config: TokencacheEnvConfig

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:  # noqa: ARG002 - verifiers' interface
        """Complete the traces of an episode.

        Raises:
            ClientError: the proxy failed, or does not know the session of a trace. verifiers then counts the episode as failed.
        """
        group = "-".join(name for name in (self.config.run, episode.task.key) if name)
        async with AsyncClient(self.config.proxy, os.environ.get(self.config.admin_key_var)) as client:
            for trace in episode.traces:
                if trace.calls:
                    session = client.session(trace.id)
                    await record(trace, session, group=group, idle_timeout=self.config.idle_timeout)
                    if self.config.delete:
                        await delete_read(session)


async def record(trace: vf.Trace, session: AsyncSession, *, group: str = "", idle_timeout: float = 60.0) -> None:
    """Finish and seal the session of a scored trace, and put the proxy's nodes and calls into the trace.

    Every sequence of the session becomes a branch of the trace: nothing is left out. If the trace has an error, the session is finished as
    failed. If the session is not valid, `ok` becomes false and its incidents become errors of the trace, so prime-rl does not train on it.
    So it is with a session that has images: the nodes of the trace have their tokens, but not the images. `info["tokencache"]` describes
    session and sequences.

    Args:
        trace: the trace, after its rewards were recorded. A reward that is `None` was not computed.
        session: its session at the proxy.
        group: the name that the rollouts of one task share.
        idle_timeout: seconds to wait for calls that are still in flight.

    Raises:
        NotFoundError: the proxy has no such session: it does not take the session from verifiers' header.
        WaitTimeoutError: a call is still in flight after `idle_timeout`.
    """
    scored = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    reward, error = trace.reward if scored else None, trace.last_error
    failed = None if error is None else _OUTCOMES.get(error.type, OutcomeKind.HARNESS)
    detail = "" if error is None else f"{error.type}: {error.message}"
    try:
        await finish_scored(session, reward, components=scored or None, group=group, failed=failed, detail=detail)
    except NotFoundError as error:
        advice = f"Start it with --session-from header:{SESSION_ID_HEADER}, and let the agent's client use it"
        raise NotFoundError(f"the proxy has no session for trace {trace.id}. {advice}", status=error.status) from error
    await session.wait(timeout=idle_timeout)
    await session.seal()
    export = await session.fetch("verifiers")
    trace.nodes = [vf.MessageNode.model_validate(node) for node in export["nodes"]]
    trace.calls = [vf.ModelCall.model_validate(call) for call in export["calls"]]
    trace.info["tokencache"] = export["info"]["tokencache"]
    branches = trace.info["tokencache"]["sequences"]
    if any(branch["media"] or any(TurnMark.MEDIA in turn["marks"] for turn in branch["turns"]) for branch in branches):
        trace.ok = False
        words = "the trace has placeholders of images without the images, so prime-rl would train them as text"
        trace.errors.append(vf.Error(type="images", message=f"{words}. Load the native format with tokencache.batching"))
    if not export["ok"]:
        trace.ok = False
        trace.errors += [vf.Error.model_validate(error) for error in export["errors"]]
