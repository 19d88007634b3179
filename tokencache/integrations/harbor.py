"""An agent and a plugin for Harbor: each trial is a session, and the verifier's reward becomes the session's reward.

    harbor run -p TASKS -m openai/MODEL \
        --agent tokencache.integrations.harbor:TokencacheAgent --agent-kwarg agent=terminus-2 --agent-kwarg url=http://127.0.0.1:8100 \
        --plugin tokencache.integrations.harbor:TokencachePlugin --plugin-kwarg url=http://127.0.0.1:8100

`TokencacheAgent` registers a key for each trial and starts one of Harbor's agents with it. `TokencachePlugin` finishes the session when the
trial ends: it stores the reward and the group, and writes the trajectories with their token ids into the trial's folder. The session has
the id of the trial as its name. `docs/integrations/harbor.md` has the complete setup.

Source: harbor 0.25.0, `harbor/agents/base.py` (`BaseAgent`), `harbor/models/job/plugin.py` (`BaseJobPlugin`), `harbor/trial/hooks.py`
(`TrialHookEvent`), `harbor/models/agent/rollout_detail.py` (`RolloutDetail`), `harbor/trial/trial.py`.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokencache.client import AsyncClient, AsyncSession, ClientError, NotFoundError, WaitTimeoutError
from tokencache.core.outcome import OutcomeKind
from tokencache.integrations.rollouts import finish_scored
from tokencache.session_url import session_url

try:
    from harbor.agents.base import BaseAgent
    from harbor.agents.factory import AgentFactory
    from harbor.environments.base import BaseEnvironment
    from harbor.job import Job
    from harbor.models.agent.context import AgentContext
    from harbor.models.agent.rollout_detail import RolloutDetail
    from harbor.models.job.plugin import BaseJobPlugin
    from harbor.models.job.result import JobResult
    from harbor.models.model_api_format import ModelApiFormat
    from harbor.models.trial.config import AgentConfig
    from harbor.models.trial.error_policy import FailureCause, policy_for
    from harbor.models.trial.paths import TrialPaths
    from harbor.models.trial.result import AgentInfo, ExceptionInfo
    from harbor.trial.hooks import TrialHookEvent
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tokencache.integrations.harbor runs inside Harbor (0.25.0): {error}. pip install harbor", name=error.name
    ) from error

log = logging.getLogger(__name__)

FOLDER = "tokencache"
"""The folder within a trial's folder in which the plugin writes its files."""
KEY_NAME = "TOKENCACHE_SESSION_KEY"
"""The environment variable in which the started agent gets its key."""

_WITHOUT_V1 = frozenset({ModelApiFormat.ANTHROPIC_MESSAGES, ModelApiFormat.GOOGLE_GENERATE_CONTENT})
"""API formats whose clients append the version of the API to the base URL themselves."""

_SHARED = ("logger", "mcp_servers", "skills_dir", "load_trajectory", "environment_logs_dir", "skip_model_parsing")
"""Arguments that Harbor gives to every agent: this agent needs them, and the agent that it runs, too."""
_OUTCOMES = {
    FailureCause.SANDBOX_FAILED: OutcomeKind.SANDBOX,
    FailureCause.MODEL_PROVIDER_FAILED: OutcomeKind.ENGINE,
    FailureCause.HARBOR_FAILED: "harbor",
    FailureCause.VERIFIER_FAILED: "verifier",
    FailureCause.AGENT_EXHAUSTED_BUDGET: OutcomeKind.BUDGET,
    FailureCause.CANCELLED: OutcomeKind.CANCELED,
}
"""The outcomes of Harbor's causes; of all others `harness`."""
_FETCH_SECONDS = 20.0
"""How long to wait for the proxy when a trial ends: Harbor may just have cancelled it."""


class TokencacheAgent(BaseAgent):
    """Runs one of Harbor's agents in a session of its own.

    The arguments are agent kwargs of Harbor, on the command line `--agent-kwarg NAME=VALUE`. All others are passed on to the agent.

    Args:
        logs_dir, model_name, extra_env, kwargs: see Harbor's `BaseAgent`.
        agent: the agent to run, as for `--agent`: a name, or `module:Class`. It must support `--base-url`.
        url: the URL of the proxy.
        agent_url: the URL of the proxy as the agent reaches it, for example from within a container; by default the proxy's
            `--public-url`, or else `url`.
        harness: name of the harness adapter whose rules apply; `""` for none.
        sampling: sampling parameters that replace those of the agent.
    """

    def __init__(
        self,
        logs_dir: Path,
        model_name: str | None = None,
        *,
        agent: str,
        url: str,
        agent_url: str | None = None,
        harness: str = "",
        sampling: Mapping[str, Any] | None = None,
        extra_env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        shared = {name: kwargs.pop(name) for name in _SHARED if name in kwargs}
        super().__init__(logs_dir, model_name, extra_env=extra_env, **shared)
        self._shared = shared
        self._config = AgentConfig(name=agent, model_name=model_name, kwargs=kwargs)
        self._url, self._agent_url = url, agent_url
        self._harness, self._sampling = harness, dict(sampling or {})
        self._agent: BaseAgent | None = None
        self._record = AgentContext()
        # Harbor reads the capabilities before `setup` creates the agent.
        self.capabilities = AgentFactory.get_agent_class_from_config(self._config).capabilities

    @staticmethod
    def name() -> str:
        """The name of this agent. `to_agent_info` names the agent that it runs."""
        return "tokencache"

    def version(self) -> str | None:
        """The version of the agent that it runs, once that is set up."""
        return None if self._agent is None else self._agent.version()

    def to_agent_info(self) -> AgentInfo:
        """Describe the agent that it runs, once that is set up."""
        return super().to_agent_info() if self._agent is None else self._agent.to_agent_info()

    @property
    def extra_env(self) -> dict[str, str]:
        """The environment variables of the agent."""
        env: dict[str, str] = super().extra_env if self._agent is None else self._agent.extra_env
        return env

    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """See `BaseAgent.set_web_tools_disabled`."""
        await self._started.set_web_tools_disabled(disabled, environment)

    async def setup(self, environment: BaseEnvironment) -> None:
        """Create the session and the agent, and set the agent up.

        Raises:
            ClientError: the proxy did not create the session.
            ValueError: the agent does not support a base URL.
        """
        metadata = {"harbor": {"agent": self._config.name, "agent_session": self.session_id}}
        async with AsyncClient(self._url, _admin_key()) as client:
            session = await client.create(str(self.context_id), harness=self._harness, sampling=self._sampling, metadata=metadata)
        self._agent = self._create(session)
        self._agent.session_id, self._agent.context_id = self.session_id, self.context_id
        await self._agent.setup(environment)

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """See `BaseAgent.run`. Adds the token ids to the context."""
        await self._recorded(self._started.run(instruction, environment, context), context)

    async def resume(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """See `BaseAgent.resume`. Adds the token ids to the context."""
        await self._recorded(self._started.resume(instruction, environment, context), context)

    async def load(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """See `BaseAgent.load`. Adds the token ids to the context."""
        await self._recorded(self._started.load(instruction, environment, context), context)

    def populate_context_post_run(self, context: AgentContext) -> None:
        """See `BaseAgent.populate_context_post_run`. Adds the token ids to the context."""
        self._started.populate_context_post_run(context)
        self._add_record(context)

    @property
    def _started(self) -> BaseAgent:
        if self._agent is None:
            raise RuntimeError("TokencacheAgent: Harbor must call setup first")
        return self._agent

    def _create(self, session: AsyncSession) -> BaseAgent:
        """Create the agent with the key and the base URL of the session.

        Clients of some APIs append `/v1` to the base URL themselves. Which API an agent speaks may depend on its base URL, so the agent is
        created twice in that case.
        """
        root = session_url(self._agent_url, session.id) if self._agent_url else session.base_url.removesuffix("/v1")
        agent = self._create_at(f"{root}/v1", session.key)
        return self._create_at(root, session.key) if agent.model_connection.model_api_format in _WITHOUT_V1 else agent

    def _create_at(self, base_url: str, key: str) -> BaseAgent:
        env = {**super().extra_env, KEY_NAME: key}
        config = self._config.model_copy(update={"base_url": base_url, "model_api_key_name": KEY_NAME, "env": env})
        return AgentFactory.create_agent_from_config(config, self.logs_dir, **self._shared)

    async def _recorded(self, running: Awaitable[None], context: AgentContext) -> None:
        try:
            await running
        finally:
            self._record = await self._fetch_record()
            # Harbor calls `populate_context_post_run` only if the context is empty, and some agents need that call.
            if not context.is_empty():
                self._add_record(context)

    async def _fetch_record(self) -> AgentContext:
        name = str(self.context_id)
        try:
            async with AsyncClient(self._url, _admin_key(), timeout=_FETCH_SECONDS) as client:
                export = await client.session(name).fetch("atif")
        except ClientError as error:
            log.warning("session %r: result.json gets no token ids, because the proxy did not return them: %s", name, error)
            return AgentContext(metadata={FOLDER: {"session": name, "error": str(error)}})
        described = {"session": name, "complete": export["complete"]}
        return AgentContext(rollout_details=rollout_details(export["trajectories"]) or None, metadata={FOLDER: described})

    def _add_record(self, context: AgentContext) -> None:
        context.rollout_details = self._record.rollout_details or context.rollout_details
        context.metadata = {**(context.metadata or {}), **(self._record.metadata or {})}


def rollout_details(trajectories: Iterable[Mapping[str, Any]]) -> list[RolloutDetail]:
    """Write ATIF trajectories as Harbor's rollout details: one for each sequence, with the turns that it trains.

    By Harbor's convention the first one is the main conversation, so the sequence with the most turns is first. Sequences with images are
    left out: there is no place for the images, so their placeholders would be trained as text.
    """
    details = []
    for trajectory in trajectories:
        if trajectory["extra"]["media"]:
            log.warning("sequence %s has images, so result.json gets no token ids of it", trajectory["trajectory_id"])
            continue
        steps = [step for step in trajectory["steps"] if "logprobs" in step.get("metrics", {})]
        if steps:
            names = ("prompt_token_ids", "completion_token_ids", "logprobs")
            columns = {name: [step["metrics"][name] for step in steps] for name in names}
            details.append(RolloutDetail(**columns, extra={"turn": [step["extra"]["turn"] for step in steps]}))
    return sorted(details, key=lambda detail: -len(detail["logprobs"]))


class TokencachePlugin(BaseJobPlugin):
    """Finishes the session of each trial with the verifier's reward, and writes its trajectories into the trial's folder.

    The session's group is the run and the name of the task, so the trials of one task are a group. `metadata` names the trial, and the
    exception if it failed. A trial that has no reward that Harbor counts, because of an exception, is finished as failed (`failure_of`).
    Trials without a session, such as those of other agents, are ignored. If the proxy fails, the trial's result stays as it is; the error
    is logged, and `on_job_end` logs how many trials it concerns.

    The files, in the folder `tokencache` of the trial:

    ======================  ================================================================================================
    `trajectory-N.json`     one ATIF trajectory for each sequence, with token ids and log probabilities
    `session.json`          the session: `complete`, incidents, figures, reward
    ======================  ================================================================================================

    Args:
        url: the URL of the proxy.
        reward: the name of the verifier's reward that becomes the session's reward. If the verifier gave a single one, that is used
            whatever its name. The others are its components.
        timeout: seconds to wait for calls that are still in flight when the trial ends.
        run: the id of the run; by default the beginning of the job's id, which a resumed job keeps.
        kwargs: see Harbor's `BaseJobPlugin`.
    """

    def __init__(self, *, url: str, reward: str = "reward", timeout: float = 60.0, run: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._url, self._reward, self._timeout, self._run = url, reward, timeout, run
        self._failed: list[str] = []

    async def on_job_start(self, job: Job) -> None:
        """Watch the trials of the job."""
        self._run = self._run or str(job.id)[:8]
        job.on_trial_ended(self.on_trial_ended)

    async def on_job_end(self, job_result: JobResult) -> None:  # noqa: ARG002 - Harbor's interface
        """Log which trials have no reward at the proxy."""
        if self._failed:
            log.error("%d trials could not be finished at the proxy: %s", len(self._failed), ", ".join(self._failed))

    async def on_trial_ended(self, event: TrialHookEvent) -> None:
        """Finish the session of a trial, and write its files."""
        folder = TrialPaths(event.config.trials_dir / event.trial_name).trial_dir / FOLDER
        try:
            async with AsyncClient(self._url, _admin_key()) as client:
                await self._finish(client.session(str(event.trial_id)), event, folder)
        except NotFoundError:
            log.info("trial %s: the proxy has no session %s", event.trial_name, event.trial_id)
        except (ClientError, ValueError, OSError):
            log.exception("trial %s: session %s is not finished at the proxy", event.trial_name, event.trial_id)
            self._failed.append(event.trial_name)

    async def _finish(self, session: AsyncSession, event: TrialHookEvent, folder: Path) -> None:
        verified = event.result.verifier_result
        rewards = {} if verified is None else verified.rewards or {}
        failure = event.result.exception_info
        trial = {"trial": event.trial_name, "task": event.task_name, "exception": None if failure is None else failure.exception_type}
        # A group has at most 200 characters.
        group, metadata, reward = f"{self._run}-{event.task_name}"[:200], {"harbor": trial}, self._scalar(rewards, event)
        failed, detail = failure_of(failure, rewarded=bool(rewards))
        await finish_scored(session, reward, components=rewards or None, group=group, metadata=metadata, failed=failed, detail=detail)
        try:
            await session.wait(timeout=self._timeout)
        except WaitTimeoutError as error:
            log.warning("trial %s: its trajectories lack calls that have not ended: %s", event.trial_name, error)
        export = await session.fetch("atif")
        await asyncio.to_thread(_write, folder, export)

    def _scalar(self, rewards: Mapping[str, float], event: TrialHookEvent) -> float | None:
        if self._reward in rewards or len(rewards) == 1:
            return rewards.get(self._reward, next(iter(rewards.values())))
        if rewards:
            log.warning(
                "trial %s: the verifier gave %s, none named %r, so the session has these components and no reward. "
                "Choose one: --plugin-kwarg reward=NAME",
                event.trial_name,
                ", ".join(rewards),
                self._reward,
            )
        return None


def failure_of(exception: ExceptionInfo | None, *, rewarded: bool) -> tuple[str | None, str]:
    """Return what failed in a trial, and a detail: `failed` and `detail` of `finish`. `None` if its reward is a measurement of the policy.

    Harbor counts the reward of a trial that used up its time or its context, or in which the model refused the task
    (`ErrorPolicy.reward_valid`).
    """
    if exception is None:
        return None, ""
    policy = policy_for(exception.exception_type)
    if policy.reward_valid and rewarded:
        return None, ""
    timeout = exception.exception_type == "AgentTimeoutError"
    kind = OutcomeKind.TIMEOUT if timeout else _OUTCOMES.get(policy.cause, OutcomeKind.HARNESS)
    return kind, f"{exception.exception_type}: {exception.exception_message}"


def _write(folder: Path, export: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trajectories = export.pop("trajectories")
    documents = {f"trajectory-{number}.json": trajectory for number, trajectory in enumerate(trajectories, 1)}
    for name, document in {**documents, "session.json": export}.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


def _admin_key() -> str | None:
    return os.environ.get("TOKENCACHE_ADMIN_KEY")
