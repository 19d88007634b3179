"""Recomputes the log probabilities of recorded tokens with any engine: `tokencache score` and `tokencache audit`.

`request`       the request for the log probabilities of given ids, and how its reply is read (pure)
`engine`        sends it, to the engine's own URL
`score`         scores the sequences of exports, several at a time, and keeps what is done in a `journal`
`rows`          the rows of a file of scores
`differences`   what is measured between recorded and recomputed values, and the engine's noise floor (pure)
`processed`     whether values are those of a distribution after temperature and top-p (pure)
`audit`         which tokens can be audited, and what explains a difference (pure)
`auditing`      runs an audit on an engine
"""
