"""A NeMo Gym model server that gives each rollout a session at the proxy and puts token ids into Gym's result.

    gym env start --search-dir "$(python -m tokencache.integrations.nemo_gym)" --model-type tokencache_model …

Gym finds model servers by folder (`responses_api_models/<name>/`), and `--search-dir` names the folder above that.
`docs/topologies/nemo-gym.md` has the complete setup. Only `model_server` imports nemo_gym (0.7.0).
"""

from pathlib import Path

SEARCH_DIR = Path(__file__).parent
"""The value for Gym's `--search-dir` (or NEMO_GYM_EXTRA_ROOTS)."""
