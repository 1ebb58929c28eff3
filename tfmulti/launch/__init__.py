"""Starts the workers of a job on this machine, watches them, and ends or restarts all together.

    python -m tfmulti.launch --num_workers 2 --max_restarts 3 -- python train.py

Each worker finds the cluster in `TF_CONFIG`, a secret in `TFMULTI_TOKEN`, and what else
`tfmulti.cluster.environment` names. A worker that fails cannot come back alone: the others have
lost it. So all are ended and all are started again, with fresh ports.

`config` and `hosts` say what to start and where, `guard` is the small process that each worker runs
under, `group` one start of all workers, `logs` what they write, `failure` which one failed first
and why, `job` the restarts.
"""
