"""Whether this host, and this cluster, are ready to train: `python -m tfmulti.doctor`.

Each module looks at one area and returns `Check`s; what it reads (the environment, files, the
driver) is an argument, so that the judgement can be tested without the hardware. Nothing here
imports TensorFlow: a separate process does, because it may crash or hang.

What is said of GPUs was tried on what users have published of theirs, not on a GPU.
"""
