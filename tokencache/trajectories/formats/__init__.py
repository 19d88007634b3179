"""Export formats: write a rollout the way a trainer reads it.

Each module writes the format of one trainer and names its source. `registry` lists all formats; several formats share `rows` and
`conversation`. A format is a pure function of a `Rollout`. It fills every field that the trainer has and invents no value.

To add a format, write one module here and add one line to `registry.FORMATS`.
"""
