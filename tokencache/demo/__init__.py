"""`tokencache demo`: runs the same agent with and without the proxy, and shows what a trainer gets in each case.

`run`        runs the agents, and compares
`stages`     the engines, with the ground truth of every call
`episodes`   the replies of the simulated model
`figures`    how much of the rollouts a trainer can use
`alignment`  two tokenizations of one reply, column by column
`show`       prints the results
"""

from tokencache.demo.run import run_demo

__all__ = ["run_demo"]
