"""Starts harnesses so that they use the proxy. Each harness is described by a data file, `harness_adapters/<name>.toml`.

A harness only needs another base URL and API key, but each harness reads them from a different place: a variable, the command line, or its
own configuration file. `docs/adapters.md` documents every field of an adapter file.

`schema`    the fields of an adapter file, and their checks
`load`      finds adapter files: those of the package and the user's own
`launch`    fills an adapter in: command line, environment and files for one session
`files`     writes configuration files into a separate directory, never over the user's own
`models`    asks the proxy which model it serves, and how long its context may be
`process`   runs the harness as a child process: input, output, signals, exit code
`commands`  `tokencache run`, `tokencache env`, `tokencache harnesses`
"""
