"""Imports NeMo Gym's token-capture package under one name.

nemo-gym 0.7.0 calls it `nemo_gym.token_id_capture`; the documentation of its main branch calls it `nemo_gym.models.token_capture`, with
the same protocols.
"""

try:
    import nemo_gym.models.token_capture as gym
except ModuleNotFoundError:
    import nemo_gym.token_id_capture as gym

__all__ = ["gym"]
