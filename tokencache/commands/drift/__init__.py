"""Drift at the trainer's side: how it is measured, and what is told of it.

`meter`    a session's turns held against the engine's plain rendering of their messages
`figures`  many sessions' drift in figures: per harness, per model, per cause
`show`     the figures as tables
`plot`     the figures as a picture (extra `plot`)
`command`  `tokencache drift`
"""
