"""Several workers from a cell of a notebook: `tfmulti.notebook_launch`.

The workers are processes of their own, started by `tfmulti.launch`, so that it does not matter what
TensorFlow has done in the notebook's kernel. The function goes to them in a file, what it returns
comes back in another.

`launching` runs in the notebook and `worker` in the workers; `serialization` transfers functions,
histories and models from one to the other, `custom` finds the classes of one's own in a model,
`cells` knows the notebook's cells, and `gpus` divides the GPUs.
"""

from tfmulti.notebook.launching import notebook_launch

__all__ = ["notebook_launch"]
