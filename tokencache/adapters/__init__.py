"""Starts harnesses so that they use the proxy. What has to be known of each harness is data, in `harness_adapters/<name>.toml`.

A harness only needs another base URL and API key. Each reads them from somewhere else: from a variable, the command line, or a file of
its own. `docs/adapters.md` documents every field of such a file.

`schema`    the fields of an adapter file, and what is refused
`load`      finds adapter files: those of the package and the user's own
`launch`    fills an adapter in: command line, environment and files for one session
`files`     writes configuration files into a directory of their own, never over the user's
`models`    asks the proxy which model it serves, and how long its context may be
`process`   runs the harness as a child process: input, output, signals, exit code
`commands`  `tokencache run`, `tokencache env`, `tokencache harnesses`
"""
