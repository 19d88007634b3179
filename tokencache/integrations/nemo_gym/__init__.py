"""A NeMo Gym model server that gives each rollout a session at the proxy and puts token ids into Gym's result.

    gym env start --search-dir "$(python -m tokencache.integrations.nemo_gym)" --model-type tokencache_model …

`model_server`     extends Gym's model server: the calls of a rollout are in one session
`rollout_session`  finds the session of a call
`results`          finishes the sessions with the rewards of Gym's verifiers
`__main__`         prints the folder for `--search-dir`

Gym finds model servers by folder (`responses_api_models/<name>/`), and `--search-dir` names the folder above that.
`docs/topologies/nemo-gym.md` has the complete setup. Only `model_server` imports nemo_gym (0.7.0).
"""

from pathlib import Path

SEARCH_DIR = Path(__file__).parent
"""The value for Gym's `--search-dir` (or NEMO_GYM_EXTRA_ROOTS)."""
