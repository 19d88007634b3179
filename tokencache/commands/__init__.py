"""The commands that read from a running proxy, or from files that they exported.

`sessions`   `tokencache sessions`: list sessions
`queue`      `tokencache queue`: show the queue of finished sessions
`report`     `tokencache report`: show the figures of a run
`lifecycle`  `tokencache create`, `finish`, `reward`, `label`, `seal`, `delete`
`rewards`    reads a reward from a file
`show`       `tokencache show`: print one session as a tree
`export`     `tokencache export`: write many sessions into one file
`manifest`   writes how an export was made
`convert`    `tokencache convert`: write a file of native rollouts in another format
`media`      `tokencache media`: write the images of sessions to files
`verify`     `tokencache verify`: check exported files or sessions
`drift`      `tokencache drift`: report drift; `drift_plot` draws it
`score`      `tokencache score`: the log probabilities of recorded sequences by any engine
`edits`      reads the file of its `--edit`, and the turns of sessions under its edits
`audit`      `tokencache audit`: compare recorded log probabilities with an engine's
`weights`    `tokencache weights`: show, set and replace the version of the weights
`harness`    `tokencache run`, `env` and `harnesses`
`rollouts`   reads rollouts for a command, from files or from sessions
`files`      reads and writes files of rollouts: JSON lines or Parquet (`parquet`); both implement `sink`
`options`    makes the options of a command from the struct of a request
`completion` what a shell offers after TAB: names of harnesses, formats, sessions, groups and runs
`console`    shared parts of the commands: options, error exits, texts for counts and sizes

They use `tokencache.client`, as any trainer does.
"""
