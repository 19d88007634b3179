"""Lets a server of NeMo Gym check a configured sink on Python 3.11, as on 3.13, which Gym declares.

Gym reads `__protocol_attrs__` of its protocols, which `typing` has since Python 3.12.
"""

import sys
import typing

if sys.version_info < (3, 12) and sys.orig_argv[-1] == "app.py":
    from tokencache.integrations.nemo_gym.gym_package import gym

    typing.EXCLUDED_ATTRIBUTES.append("__protocol_attrs__")
    for protocol in (gym.LineageResolver, gym.TokenSink):
        protocol.__protocol_attrs__ = typing._get_protocol_attrs(protocol)
