"""Logs the figures of a run to Weights & Biases, MLflow or TensorBoard.

    log = WandbCallback(client, "7f3a9c21")  # after wandb.init()
    for step in range(steps):
        ...
        log(step)

A callback asks the proxy for the figures of the run (`Client.report`), and logs them as `tokencache/…`: `RunReport.metrics` names them.
They are of all sessions that the proxy has at that moment, so log before sessions are deleted. The three packages are extras: `wandb`,
`mlflow` and `tensorboard`.
"""

import time
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tokencache.client import Client, RunReport
from tokencache.errors import extra_missing

_PREFIX = "tokencache/"


class ReportOptions(TypedDict, total=False):
    """Options of `Client.report`."""

    tag: str
    passing: float
    with_failed: bool


class _Callback:
    """Fetches the figures of a run; a subclass logs them.

    Args:
        client: the proxy.
        run: the id of the run; `""` for all sessions, or with `tag` for those with a tag.
        options: options of `Client.report`.
    """

    def __init__(self, client: Client, run: str = "", **options: Unpack[ReportOptions]) -> None:
        self._client, self._run, self._options = client, run, options

    def __call__(self, step: int) -> RunReport:
        """Log the figures as they are now, for a step of the training. Returns them.

        Raises:
            ClientError: the proxy does not answer, or has no session of the run.
        """
        report = self._client.report(self._run, limit=0, **self._options)
        self._write({_PREFIX + name: value for name, value in report.metrics().items()}, step)
        return report

    def _write(self, metrics: dict[str, float], step: int) -> None:
        raise NotImplementedError


class WandbCallback(_Callback):
    """Logs to the current run of Weights & Biases, or to the one that `into` is.

    The figures have a step of their own, `tokencache/step`: W&B drops what is logged for an earlier step than the trainer's last one.

    Raises:
        ModuleNotFoundError: `wandb` is not installed.
        RuntimeError: there is no current run.
    """

    def __init__(self, client: Client, run: str = "", *, into: Any = None, **options: Unpack[ReportOptions]) -> None:
        super().__init__(client, run, **options)
        try:
            import wandb  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as why:
            raise ModuleNotFoundError(extra_missing("WandbCallback", "wandb", why.name), name=why.name) from None
        self._into = into or wandb.run
        if self._into is None:
            raise RuntimeError("there is no run of Weights & Biases: call wandb.init() first, or give it as `into`")
        self._into.define_metric(_PREFIX + "step")
        self._into.define_metric(_PREFIX + "*", step_metric=_PREFIX + "step")

    def _write(self, metrics: dict[str, float], step: int) -> None:
        self._into.log({**metrics, _PREFIX + "step": step})


class MlflowCallback(_Callback):
    """Logs to the active run of MLflow, or to the one whose id `into` is.

    Raises:
        ModuleNotFoundError: `mlflow` is not installed.
    """

    def __init__(self, client: Client, run: str = "", *, into: str | None = None, **options: Unpack[ReportOptions]) -> None:
        super().__init__(client, run, **options)
        try:
            import mlflow  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as why:
            raise ModuleNotFoundError(extra_missing("MlflowCallback", "mlflow", why.name), name=why.name) from None
        self._mlflow, self._into = mlflow, into

    def _write(self, metrics: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(metrics, step=step, run_id=self._into)


class TensorBoardCallback(_Callback):
    """Logs into a folder of TensorBoard: a file of events of its own, beside those of the trainer.

    Raises:
        ModuleNotFoundError: `tensorboard` is not installed.
    """

    def __init__(self, client: Client, run: str = "", *, into: Path | str, **options: Unpack[ReportOptions]) -> None:
        super().__init__(client, run, **options)
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - an extra
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as why:
            raise ModuleNotFoundError(extra_missing("TensorBoardCallback", "tensorboard", why.name), name=why.name) from None
        self._event, self._summary, self._writer = (
            event_pb2.Event,
            summary_pb2.Summary,
            EventFileWriter(str(into), filename_suffix=".tokencache"),
        )

    def _write(self, metrics: dict[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
