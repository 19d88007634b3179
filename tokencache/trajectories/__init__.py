"""Turns the records of a session into trajectories that a trainer can use.

All modules compute from records alone: none opens a socket, calls an engine or reads a store.

`values`      trajectories, sequences, turns and session states as typed values: the content of the native format
`rollout`     puts the records of a session together: labelled sequences, weights, figures
`links`       links answers that return as text to the turns that sampled them
`changes`     says what changed in the request of each turn
`lengths`     limits for the length of sequences; `limiting` leaves out what no trainer should get
`summaries`   a session in one line, made without its turns; `reports` the figures of a run; `runs` computes them
`versions`    counts the policy versions of a rollout's tokens
`placeholders` finds turns whose sampled tokens contain a placeholder of an image
`formats`     writes a rollout in the format of a trainer; `formats.registry` lists all formats
`verify`      checks an exported trajectory with nothing but the export
`verify_rows` checks the rows of any export format
`digest`      one hash over everything in an export
`drift_rates` sums up the drift of many trajectories
"""
