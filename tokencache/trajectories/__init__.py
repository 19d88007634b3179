"""Trajectories: recorded turns as rollouts, the checks on them, and the trainers' formats."""
