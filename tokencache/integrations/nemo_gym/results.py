"""Finishes the sessions of NeMo Gym's rollouts with the rewards of Gym's verifiers.

    with Client("http://proxy:8100") as client:
        finish(client, map(json.loads, Path("results.jsonl").read_text().splitlines()))

Source: nemo-gym 0.7.0, `nemo_gym/rollout_correlation.py` (`maybe_rollout_id_from_run_body`), `nemo_gym/rollout_collection.py`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym.global_config import TASK_INDEX_KEY_NAME
from nemo_gym.rollout_collection import NG_FAILURE_CLASS_KEY
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body

from tokencache.client import Client, NotFoundError
from tokencache.integrations.rollouts import finish_scored_blocking


def finish(client: Client, results: Iterable[Mapping[str, Any]]) -> None:
    """Finish the session of each result, and store its reward. The session's group is the number of the task.

    A result that is no measurement of the policy is finished as failed, with Gym's own word: one with `mask_sample`, and one of the file of
    failures (`…_failures.jsonl`), unless `results` also has one of the same rollout that succeeded. One whose reward is not a finite number
    is finished as `verifier`.

    Args:
        client: of the proxy.
        results: lines of the files that Gym's rollout collection writes. The rollout id of a result is the name of its session; so this
            needs `observability_enabled: true` or `token_id_capture.enabled: true`, with which Gym sends the id.

    Raises:
        NotFoundError: some results have no session, because Gym did not send their ids, or no call was made. Raised at the end, after
            all others are finished.
    """
    named = [(str(maybe_rollout_id_from_run_body(result)), result, *_failure(result)) for result in results]
    succeeded = {name for name, _, failed, _ in named if failed is None}
    missing = []
    for name, result, failed, detail in named:
        if failed and name in succeeded:
            continue
        try:
            group = str(result.get(TASK_INDEX_KEY_NAME, ""))
            finish_scored_blocking(client.session(name), result.get("reward"), group=group, failed=failed, detail=detail)
        except NotFoundError:
            missing.append(name)
    if missing:
        advice = "Set observability_enabled: true, so that Gym's agents send the rollout id"
        raise NotFoundError(f"the proxy has no session for rollout {', '.join(missing)}; all others are finished. {advice}")


def _failure(result: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return what failed, and a detail: `failed` and `detail` of `finish`. `None` if the result is a measurement."""
    kind = result.get(NG_FAILURE_CLASS_KEY) or (result.get("mask_sample") and (result.get("failure_kind") or "masked"))
    if not kind:
        return None, ""
    detail = result.get("failure_reason") or result.get("_ng_failure_message") or kind
    word = re.sub(r"[^a-z0-9_-]", "-", str(kind).lower())
    return (word if word[0].isalpha() else f"gym-{word}")[:32], str(detail)
