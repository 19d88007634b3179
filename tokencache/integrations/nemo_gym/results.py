"""Finishes the sessions of NeMo Gym's rollouts with the rewards of Gym's verifiers.

    with Client("http://proxy:8100") as client:
        finish(client, map(json.loads, Path("results.jsonl").read_text().splitlines()))

Source: nemo-gym 0.7.0, `nemo_gym/rollout_correlation.py` (`maybe_rollout_id_from_run_body`), `nemo_gym/rollout_collection.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym.global_config import TASK_INDEX_KEY_NAME
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body

from tokencache.client import Client, NotFoundError


def finish(client: Client, results: Iterable[Mapping[str, Any]]) -> None:
    """Finish the session of each result, and store its reward. The session's group is the number of the task.

    Args:
        client: of the proxy.
        results: lines of the file that Gym's rollout collection writes. The rollout id of a result is the name of its session; so this
            needs `observability_enabled: true` or `token_id_capture.enabled: true`, with which Gym sends the id.

    Raises:
        NotFoundError: some results have no session, because Gym did not send their ids, or no call was made. Raised at the end, after
            all others are finished.
    """
    missing = []
    for result in results:
        name = maybe_rollout_id_from_run_body(result)
        try:
            client.session(str(name)).finish(result.get("reward"), group=str(result.get(TASK_INDEX_KEY_NAME, "")))
        except NotFoundError:
            missing.append(str(name))
    if missing:
        advice = "Set observability_enabled: true, so that Gym's agents send the rollout id"
        raise NotFoundError(f"the proxy has no session for rollout {', '.join(missing)}; all others are finished. {advice}")
