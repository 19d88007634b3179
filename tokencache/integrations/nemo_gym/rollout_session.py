"""Finds the proxy's session for a call that reaches Gym's model server.

Gym identifies a rollout in two ways (nemo-gym 0.7.0). The path prefix `/ng-rollout/<id>` carries the rollout's id if
`observability_enabled` or `token_id_capture.enabled` is set (`nemo_gym/rollout_correlation.py`). Otherwise the model
server's session cookie identifies the rollout, for every agent that sends it back, as `simple_agent` does
(`nemo_gym/server_utils.py`, `setup_session_middleware`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class RolloutSession(NamedTuple):
    """A session's name, and whether the client named it. If not, the name is new and no other call uses it."""

    name: str
    named: bool

    def loses(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a call with these chat messages continues a rollout that this session does not contain."""
        return not self.named and any(message.get("role") == "assistant" for message in messages)


def session_of(rollout_id: str | None, cookie_session: str, *, cookie_sent: bool) -> RolloutSession:
    """Return the session of a call: its rollout id, else the session of Gym's cookie.

    Args:
        rollout_id: the id of the path prefix, `None` without one.
        cookie_session: the id in Gym's session cookie, which Gym generates if the client sent none.
        cookie_sent: whether the client sent that cookie.
    """
    if rollout_id is not None:
        return RolloutSession(rollout_id, named=True)
    return RolloutSession(cookie_session, named=cookie_sent)
