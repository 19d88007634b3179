"""Turns the records of a session into trajectories that a trainer can use.

All modules compute from records alone: none opens a socket, calls an engine or reads a store.

`values`      trajectories, sequences, turns and session states as typed values: the content of the native format
`rollout`     puts the records of a session together: labelled sequences, weights, figures
`formats`     writes a rollout in the format of a trainer; `formats.registry` lists all formats
`verify`      checks an exported trajectory with nothing but the export
`drift_rates` sums up the drift of many trajectories
"""
