"""Adapters: what there is to know about a harness, as data, and how to start it with its base URL here.

A harness changes nothing but its base URL and its key, yet each wants them somewhere else: in a variable, on the command
line, in a file of its own. `harness_adapters/<name>.toml` says where; the README beside those files documents every field.

==============  =====================================================================================================
`schema`        what stands in such a file, and what is refused
`load`          finds the files: those that come with the package, and the user's own
`launch`        fills one in: command line, environment and files of one session
`files`         configuration files, written into a directory of their own, never over the user's
`served`        which model does the proxy serve, and how long may its context be?
`process`       the harness as a child process: its input, output, signals and exit code
`commands`      `tokencache run`, `tokencache env`, `tokencache harnesses`
==============  =====================================================================================================
"""
