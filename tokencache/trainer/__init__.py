"""The trainer's side: sessions, turns and trajectories under `/tokencache/v1/`.

`native`   the native trajectory format
`api`      the routes
"""
