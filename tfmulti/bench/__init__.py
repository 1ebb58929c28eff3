"""`python -m tfmulti.bench`: what a step costs, where its time goes, and what bounds it.

Every configuration (a kind of training on a number of replicas) is a job of its own that is started
once, builds its model, warms up, and then waits. The driver orders one block of steps after the
other, each from another configuration, there and back again, so that whatever drifts in the machine
drifts for all. Only one configuration runs at a time.

`config` has the flags, and `setups` says what is started. `jobs` starts it and orders; `worker` and
`training` run in its processes. `schedule` goes round the configurations, `results` makes figures
of times, `report` tells them.

What compares the project with others is no part of the package: see `benchmarks/` in a clone.
"""

from tfmulti.bench.config import BenchConfig as BenchConfig
