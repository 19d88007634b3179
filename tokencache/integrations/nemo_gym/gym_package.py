"""Imports NeMo Gym's token-capture package under one name.

nemo-gym 0.7.0 calls it `nemo_gym.token_id_capture`; the documentation of its main branch calls it `nemo_gym.models.token_capture`, with
the same protocols. A missing requirement of that package is an error: the older name would not have it either.
"""

try:
    import nemo_gym.models.token_capture as gym
except ModuleNotFoundError as error:
    if error.name not in {"nemo_gym.models", "nemo_gym.models.token_capture"}:
        raise
    import nemo_gym.token_id_capture as gym

__all__ = ["gym"]
