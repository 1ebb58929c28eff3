"""`python -m tfmulti.bench`: what a step costs, where its time goes, and who is faster.

Every configuration (a kind of training on a number of replicas) is a job of its own that is started
once, builds its model, warms up, and then waits. The driver orders one block of steps after the
other, each from another configuration, there and back again, so that whatever drifts in the machine
drifts for all. Only one configuration runs at a time.

`config` has the flags. `setups` says what is started and `jobs` starts it; `control` is how the
driver and its processes speak, `worker`, `training` and `workloads` are what runs in ours.
`schedule` goes round the configurations. `allreduce` and `transports` measure the reduction alone.
`statistics`, `breakdown`, `ratios` and `projection` make figures of times; `machine`, `table`,
`record`, `markdown` and `plot` tell them.
"""

from tfmulti.bench.config import BenchConfig as BenchConfig
