"""The trainer's side: sessions, turns and trajectories under `/tokencache/v1/`.

`api`       the routes
`engines`   the routes by which engines are added, drained and removed
`guard`     who may use them
`reader`    a session's records, as they are stored
`rollout`   records → what a trainer takes home: labelled sequences, weights, figures
`formats`   a rollout as each trainer wants it
`press`     the process in which large ones are laid out
`drift`     what a plain rendering would have had otherwise: measured, reported, drawn
`verify`    what must hold of an exported trajectory, checked with nothing but the export
`browse`    what a person looks at, in the viewer (`tokencache.viewer`)
"""
