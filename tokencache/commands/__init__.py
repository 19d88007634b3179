"""The commands that read from a running proxy, or from files that they exported.

`sessions`   `tokencache sessions`: list sessions
`show`       `tokencache show`: print one session as a tree
`export`     `tokencache export`: write many sessions into one file
`verify`     `tokencache verify`: check exported files or sessions
`drift`      `tokencache drift`: report drift; `drift_plot` draws it
`files`      reads and writes files of rollouts: JSON lines or Parquet (`parquet`); `sink` is their common part
`console`    what the commands share: options, error exits, words for counts and sizes

They use `tokencache.client`, as any trainer does.
"""
