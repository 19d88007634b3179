"""Trains any harness that has an adapter with TRL's asynchronous GRPO: a factory of sessions for OpenEnv's harness protocol.

TRL's `HarnessRolloutWorker` makes the factory in a process of its own, and plays each rollout in one of its sessions:

    def start(task: Any, workspace: Path) -> list[str]:  # prepares the task, and returns the arguments of the harness
        return ["-p", task, "--dangerously-skip-permissions"]

    def grade(task: Any, workspace: Path) -> float:
        return float((workspace / "hello.txt").exists())

    HarnessRolloutWorker(
        harness_session_factory=functools.partial(
            HarnessSessionFactory, "http://127.0.0.1:8100", start, grade, harness="claude-code"), ...)

The harness is a program that calls the proxy, in any dialect. Each turn of the trace has the prompt that the engine used and the ids that
it sampled, so the rows that TRL makes of a trace are the sequences of the session's export.

A session that fails raises `FailedRolloutError` before it has a trace. TRL then leaves the rollout out of its group.

Source: trl 1.16.0, `trl/experimental/async_grpo/openenv_harness.py` (`_HarnessRolloutLoop._run_session`), and openenv 0.10.0,
`openenv/core/harness/rollout.py` (`ResourceSession`, `TrainableSession`) and `training.py` (`TrainingTrace`).
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Unpack

from tokencache.adapters import files, process
from tokencache.adapters.load import AdapterError, load
from tokencache.client import AsyncClient, AsyncSession, Client, ClientError, Trajectory, TurnSpan
from tokencache.client.operations import SessionOptions
from tokencache.core import ids
from tokencache.core.outcome import OutcomeKind
from tokencache.integrations.rollouts import FailedRollout, FailedRolloutError, Rollouts, new_run
from tokencache.integrations.rows import RowPolicy, RowsError, check_policy, choose_rows
from tokencache.trajectories.values import Sequence as TokenSequence

try:
    from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, TrainingTurn, VerifyResult
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tokencache.integrations.openenv runs inside OpenEnv (0.10.0): {error}. pip install openenv", name=error.name
    ) from error

Start: TypeAlias = Callable[[Any, Path], Sequence[str]]
"""Prepares a task in an empty directory, in which the harness then runs, and returns the harness's arguments."""
Grade: TypeAlias = Callable[[Any, Path], float | None]
"""Returns the reward of a harness that ended, from the task and the directory in which it ran."""

_TAIL = 500
"""Characters of the harness's output that the detail of a failure quotes: the last ones."""


class _Done(NamedTuple):
    """A valid rollout."""

    reward: float | None
    sequences: list[TokenSequence]


class HarnessSessionFactory(ResourceSessionFactory["HarnessSession"]):
    """Makes a session of the proxy, and a process of the harness, for each rollout.

    Pass TRL `functools.partial(HarnessSessionFactory, …)`: TRL adds its own `sampling`, which then holds for all calls of the harness,
    whatever it asks for. The functions must be importable, because TRL sends them to another process.
    """

    def __init__(
        self,
        url: str,
        start: Start,
        grade: Grade | None = None,
        *,
        rows: RowPolicy = "main",
        max_tokens: int | None = None,
        timeout_s: float = 3600.0,
        admin_key: str | None = None,
        delete: bool = False,
        run: str = "",
        **options: Unpack[SessionOptions],
    ) -> None:
        """Check that the harness is installed and that the proxy has an engine, so that TRL's worker does not start without them.

        Args:
            url: base URL of the proxy, without `/v1`.
            start: prepares a task, and returns the arguments of the harness. For a harness without a program of its own (a library), it
                returns the whole command.
            grade: returns the reward. It is called only if the harness ended with exit code 0. `None` if another process posts the
                reward, or if TRL has reward functions of its own.
            rows: which sequences of a session TRL trains (`tokencache.integrations.rows`).
            max_tokens: the most tokens of a reply; `None`: as the harness asks for.
            timeout_s: seconds after which the harness is killed, and the rollout has failed.
            admin_key: the trainer's key.
            delete: whether sessions are deleted once TRL has their trace. Failed ones stay.
            run: the id of the run; by default a new one.
            options: options of `AsyncClient.create` for all sessions. `harness` is required. `config_dir` and `group` are replaced.

        Raises:
            AdapterError: there is no such harness, or its program is not on the PATH.
            ClientError: the proxy is not reached, or refuses the key.
            RuntimeError: no engine of the proxy serves.
            ValueError: `rows` is no policy, or no harness is named.
        """
        check_policy(rows, several=True)
        if not options.get("harness"):
            raise ValueError("harness: name the adapter of the harness; `tokencache harnesses` lists all")
        self.adapter = load(options["harness"])
        if self.adapter.program:
            process.find(self.adapter, self.adapter.program, os.environ.get("PATH"))
        with Client(url, admin_key) as client:
            engines = client.engines()
        if not any(engine.serves for engine in engines):
            reasons = "; ".join(f"{engine.url}: {engine.error or engine.state}" for engine in engines)
            raise RuntimeError(f"no engine of {url} serves: {reasons or 'it has none'}")
        self.url, self.admin_key, self.start, self.grade, self.rows = url, admin_key, start, grade, rows
        self.timeout_s, self.delete, self.run = timeout_s, delete, run or new_run()
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        self.options: SessionOptions = {**options, "sampling": {**options.get("sampling", {}), **limit}}

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> "HarnessSession":
        """Return a session for one rollout of a task. It starts nothing yet.

        Args:
            task: the `prompt` of a row of TRL's data set.
            seed: TRL's number of the group.
            episode_id: TRL's id of the rollout. The session's metadata has it as `episode`.
        """
        return HarnessSession(self, task, group="" if seed is None else f"{seed}", episode=episode_id or "")


class HarnessSession(ResourceSession):
    """One rollout of a harness: OpenEnv's `TrainableSession`."""

    def __init__(self, factory: HarnessSessionFactory, task: Any, *, group: str, episode: str) -> None:
        self._factory, self._task, self._group, self._episode = factory, task, group, episode
        self._done: _Done | None = None
        self._wrong_setup: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._cancel: Callable[[], Any] | None = None

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Run the harness to its end, grade it, finish and seal its session, and read it.

        A wrong setup, such as a key that the proxy refuses, is raised by `fetch_training_trace`: only there it stops TRL's worker.

        Args:
            timeout_s: seconds after which the harness is killed; `None`: those of the factory.

        Returns:
            The exit code of the harness: 0. 1 if the setup is wrong.

        Raises:
            FailedRolloutError: the rollout failed, also because its time was up: TRL would train what was recorded until a `TimeoutError`.
        """
        try:
            with files.temporary_directory(self._factory.adapter.name) as directory:
                done = asyncio.run(self._play(Path(directory), timeout_s or self._factory.timeout_s))
        except asyncio.CancelledError:
            raise FailedRolloutError(f"{OutcomeKind.CANCELED}: the rollout was closed before its end") from None
        except (AdapterError, ClientError, RowsError) as error:
            self._wrong_setup = error
            return 1
        if isinstance(done, FailedRollout):
            raise FailedRolloutError(f"{done.kind}: {done}")
        self._done = done
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the turns of the rows, in the order of the export.

        Raises:
            ValueError: the setup is wrong, or OpenEnv refuses a turn, for example for a log probability above 0. TRL's worker stops.
            RuntimeError: there is no valid rollout.
        """
        if self._wrong_setup is not None:
            raise ValueError(str(self._wrong_setup)) from self._wrong_setup
        return TrainingTrace(turns=list(turns_of(self._completed.sequences)))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """Return the reward of the session; `None` if it has none. Raises `RuntimeError` if there is no valid rollout."""
        del transcript, final_state
        return VerifyResult(env_reward=self._completed.reward, done=True)

    def close(self) -> None:
        """Kill the harness if it still runs: its session is then finished as `canceled`. Another thread may call this."""
        with self._lock:
            self._closed = True
            if self._cancel is not None:
                self._cancel()
                self._cancel = None

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return no messages: the harness has its task."""
        return []

    def list_tools(self) -> list[Any]:
        """Return no tools: the harness has its own."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Refuse: the harness calls its own tools."""
        del arguments
        return ToolResult(error=f"{name}: {self._factory.adapter.title} calls its own tools")

    @property
    def _completed(self) -> _Done:
        if self._done is None:
            raise RuntimeError("there is no valid rollout: call wait_for_completion first")
        return self._done

    async def _play(self, directory: Path, seconds: float) -> _Done | FailedRollout:
        factory = self._factory
        workspace, output = directory / "work", directory / "output"
        workspace.mkdir()

        async def play(session: AsyncSession, task: Any) -> float | None:
            code = await self._run(session, task, workspace, output, seconds)
            if code:
                if (await session.state()).outcome == OutcomeKind.OK:  # otherwise the proxy knows what failed
                    tail = output.read_bytes().decode(errors="replace").strip()[-_TAIL:]
                    await session.finish(failed=OutcomeKind.HARNESS, detail=f"{factory.adapter.title} ended with exit code {code}: {tail}")
                return None
            return await asyncio.to_thread(factory.grade, task, workspace) if factory.grade is not None else None

        async def read(_session: AsyncSession, trajectory: Trajectory) -> _Done:
            chosen = choose_rows(trajectory, factory.rows, several=True)
            return _Done(trajectory.reward, [row.sequence for row in chosen.kept])

        options: SessionOptions = {**factory.options, "config_dir": directory / "configuration"}
        options["metadata"] = {**factory.options.get("metadata", {}), "episode": self._episode}
        rollouts: Rollouts[Any, _Done] = Rollouts(play=play, read=read, run=factory.run, options=options, delete=factory.delete)
        self._let_close_cancel()
        try:
            async with AsyncClient(factory.url, factory.admin_key) as client:
                return await rollouts.one(client, self._task, group=self._group, sampling={})
        finally:
            with self._lock:
                self._cancel = None

    def _let_close_cancel(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 - this is called in one
        with self._lock:
            if self._closed:
                raise asyncio.CancelledError
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)

    async def _run(self, session: AsyncSession, task: Any, workspace: Path, output: Path, seconds: float) -> int:
        """Run the harness, and return its exit code. If its time is up, kill it, and finish the session as failed."""
        factory = self._factory
        arguments = await asyncio.to_thread(factory.start, task, workspace)
        assert session.launch is not None  # noqa: S101 - the session names a harness
        command = [*session.launch.argv, *arguments]
        process.find(factory.adapter, command, os.environ.get("PATH"))
        environment = session.launch.environment(os.environ)
        try:
            async with asyncio.timeout(seconds):
                return await _run_program(command, environment, workspace, output)
        except TimeoutError:
            await session.finish(failed=OutcomeKind.TIMEOUT, detail=f"{factory.adapter.title} ran for more than {seconds:g} seconds")
            return -signal.SIGKILL


async def _run_program(command: Sequence[str], environment: Mapping[str, str], directory: Path, output: Path) -> int:
    """Run a program in a directory, with its output in a file, and return its exit code. All that it started is killed when it ends."""
    with output.open("wb") as file:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        try:
            return await child.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


def turns_of(sequences: Iterable[TokenSequence]) -> Iterable[TrainingTurn]:
    """Yield the turns of some sequences. Each has all tokens before its completion as its prompt, so TRL joins those of a sequence.

    TRL also joins two sequences if the second begins with all tokens of the first: each token keeps its mask. If the second begins with a
    part of the first's last reply, TRL takes that for a new tokenization of the reply, and no longer trains the rest of it, which is less
    than `fork_threshold_tokens` (1,024) long. So a turn with nothing to train is put in between; TRL makes no row of it.
    """
    before: TokenSequence | None = None
    for sequence in sequences:
        if before is not None and _may_overwrite(sequence, before):
            other = int(sequence.token_ids[0] == 0)  # any token with which neither sequence begins
            yield TrainingTurn(
                node_id=f"{sequence.id}/", prompt_token_ids=[other], completion_token_ids=[], per_token_logps=[], loss_mask=[0]
            )
        before = sequence
        for span in sequence.turns:
            start, end = span.completion
            yield TrainingTurn(
                node_id=f"{sequence.id}/{span.turn}",
                prompt_token_ids=sequence.token_ids[:start],
                completion_token_ids=sequence.token_ids[start:end],
                per_token_logps=sequence.logprobs[start:end],
                loss_mask=[0] * start + sequence.loss_mask[start:end],
                response={"choices": [{"message": _message(span), "finish_reason": span.finish_reason}]},
                metadata={"model": span.model, "sampling_params": span.sampling},
            )


def _may_overwrite(sequence: TokenSequence, before: TokenSequence) -> bool:
    """Whether a sequence begins with a part of the last reply of the one before (TRL, `_SampleBuilder.classify_token_drift`)."""
    prompt = sequence.token_ids[: sequence.turns[0].completion[0]]
    same = ids.common_head(ids.pack(before.token_ids), ids.pack(prompt))
    return before.turns[-1].completion[0] <= same < len(before.token_ids)


def _message(span: TurnSpan) -> dict[str, Any]:
    """Return the reply of a turn as a message, for TRL's reward functions and its figures on tools."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in span.served.tool_calls
    ]
    return {"role": "assistant", "content": span.served.content or "", **({"tool_calls": calls} if calls else {})}
