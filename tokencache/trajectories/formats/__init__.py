"""Formats: a rollout as trainers want it.

Each module writes one trainer's own format, whose source it names; `registry` lists them all. A format is a pure function
of a `Rollout`: it leaves nothing out that the trainer has a place for, and invents nothing.
"""
