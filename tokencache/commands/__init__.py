"""The commands that read from a running proxy, or from files that they exported.

`sessions`   `tokencache sessions`: list sessions
`show`       `tokencache show`: print one session as a tree
`export`     `tokencache export`: write many sessions into one file
`verify`     `tokencache verify`: check exported files or sessions
`drift`      `tokencache drift`: report drift; `drift_plot` draws it
`files`      reads and writes files of rollouts: JSON lines or Parquet (`parquet`); both implement `sink`
`console`    shared parts of the commands: options, error exits, texts for counts and sizes

They use `tokencache.client`, as any trainer does.
"""
