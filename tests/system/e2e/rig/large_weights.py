"""A plugin of vLLM for tests: weights that `--load-format dummy` makes are large enough that each image changes log probabilities."""

import inspect

BOUND = 0.3
"""Weights are drawn from -BOUND to BOUND; vLLM 0.32 takes 0.001."""


def register():
    from vllm.model_executor.model_loader import weight_utils

    dummy = inspect.unwrap(weight_utils.initialize_single_dummy_weight)
    dummy.__defaults__ = (-BOUND, BOUND, *dummy.__defaults__[2:])
