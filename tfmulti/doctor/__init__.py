"""Whether this host, and this cluster, are ready to train: `python -m tfmulti.doctor`.

Each module looks at one area and returns `Check`s; what it reads (the environment, files, the
driver) is an argument, so that it can be tested without the hardware. Nothing here imports
TensorFlow: a separate process does, because it may crash or hang.

The checks of GPUs were tested with output that users have published, and run on one H200.
"""
