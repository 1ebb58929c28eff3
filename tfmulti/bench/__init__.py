"""`python -m tfmulti.bench`: what a step costs, where its time goes, and what bounds it.

Every configuration (a kind of training on a number of replicas) is a job of its own that is started
once, builds its model, warms up, and then waits. The driver orders one block of steps after the
other, each from another configuration, forward and then backward, so that drifts of the machine
affect all of them. Only one configuration runs at a time.

`setups` has the flags and the configurations. `jobs` starts them and sends orders;
`worker` and `training` run in their processes. `schedule` alternates between the configurations,
`results` summarizes their times, and `report` shows them.

What compares the project with others is no part of the package: see `benchmarks/` in a clone.
"""

from tfmulti.bench.setups import BenchConfig as BenchConfig
