"""Variables by which a launcher and its workers speak to one another.

`python -m tfmulti.launch` sets them; another launcher may do the same.
"""

TOKEN = "TFMULTI_TOKEN"
"""The secret of one job: only who knows it may come to the meeting of its workers."""

START_TIMEOUT = "TFMULTI_START_TIMEOUT"
"""Seconds that workers wait for one another before TensorFlow starts."""

RESTARTS = "TFMULTI_RESTARTS"
"""How often the workers of this job have been restarted, from "0"."""

PROGRESS = "TFMULTI_PROGRESS"
"""A file of this worker's own, to be made once a training step is done.

A program that fails with exit code 1 or 2 before any worker has made its file is not restarted.
"""

PREEMPTED = 143
"""Exit code of a worker that was told to end (SIGTERM), and did so in good order."""

PEER_LOST = 144
"""Exit code of a worker that ends because another one has gone."""
