"""Export formats: write a rollout the way a trainer reads it.

Each module writes the format of one trainer and names its source: `native` (everything that is recorded), `verl`, `skyrl`, `slime` (and
miles), `trl`, `tinker`, `verifiers` (and prime-rl), `nemo_gym`, `atif` (Harbor). `registry` lists all formats, and `reading` reads the
native one back. Several formats share `rows` and `conversation`. A format is a pure function of a `Rollout`. It fills every field that the
trainer has and invents no value.

To add a format, write one module here and add one line to `registry.FORMATS`.

`agentic_mooncake` (Dynamo's simulator) and `weka` (aiperf) write `traces` of many sessions: `registry.TRACES`.
"""
