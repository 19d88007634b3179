"""What a trainer does from a shell: list sessions, look at one, take them home, check what was taken.

`app`       the commands: `sessions`, `show`, `export`, `verify`
`bulk`      many sessions into one file, whole or not at all
`files`     rollouts in files: JSON lines, and which file is read and written how
`parquet`   rollouts as Parquet
`checking`  what `verify` finds in a file or a session
`tree`      one session as a tree, for a terminal
`printed`   what else is printed

They talk to the proxy as any trainer does, through `tokencache.client`.
"""
