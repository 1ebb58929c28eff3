"""Starts the workers of a job on this machine, monitors them, and stops or restarts all together.

    python -m tfmulti.launch --num_workers 2 --max_restarts 3 -- python train.py

Each worker finds the cluster in `TF_CONFIG`, a secret in `TFMULTI_TOKEN`, and the other variables
of `tfmulti.cluster.environment`. A worker that fails cannot rejoin the others, so all are stopped
and restarted, with new ports.

`config` defines what to start and where; `supervisor` is the small process that runs each worker;
`group` starts all workers once; `logs` reads their output and finds the one that failed first;
`job` watches and restarts them.
"""
