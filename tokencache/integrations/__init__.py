"""Integrations: parts of tokencache that run inside another framework's process and import that framework.

No other package imports them, so a framework is needed only by those who use its integration.

`rollouts`   plays rollouts, each in a session of its own, and goes on when some fail
`rows`       chooses the rows that a trainer gets; `fetching` reads them
`verl`       an agent loop for verl
`skyrl`      a generator for SkyRL
`trl`        rollouts, rewards and transfer of weights for TRL
`openenv`    sessions for OpenEnv, so that TRL's rollout worker runs harness programs
`verifiers`  an environment for verifiers, and so for prime-rl
`harbor`     an agent and a plugin for Harbor
`nemo_gym`   a model server for NeMo Gym
`trackers`   callbacks that log the figures of a run to Weights & Biases, MLflow and TensorBoard
"""
