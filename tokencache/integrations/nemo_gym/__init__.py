"""For NeMo Gym: a model server that gives each rollout a session at the proxy, and token capture on tokencache's stores.

    gym env start --search-dir "$(python -m tokencache.integrations.nemo_gym)" --model-type tokencache_model …

`model_server`     extends Gym's model server: the calls of a rollout are in one session
`rollout_session`  finds the session of a call
`results`          finishes the sessions with the rewards of Gym's verifiers
`proving`          proves parents of captured calls by their tokens, where Gym did not recognize the text
`capture`          keeps captured calls in a store of tokencache
`gym_package`      imports Gym's capture package, whose name differs between versions
`__main__`         prints the folder for `--search-dir`

Gym finds model servers by folder (`responses_api_models/<name>/`), and `--search-dir` names the folder above that.
`docs/topologies/nemo-gym.md` has the complete setup. Only `model_server`, `results` and what
concerns the capture import nemo_gym (0.7.0).
"""

from pathlib import Path

SEARCH_DIR = Path(__file__).parent
"""The value for Gym's `--search-dir` (or NEMO_GYM_EXTRA_ROOTS)."""
