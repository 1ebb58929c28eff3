"""Several workers from a cell of a notebook: `tfmulti.notebook_launch`.

The workers are separate processes, started by `tfmulti.launch`, so that it does not matter what
TensorFlow has done in the notebook's kernel. The function is sent to them in a file, and its result
returns in another.

`launching` runs in the notebook and `worker` in the workers; `serialization` transfers functions,
histories and models between them.
"""

from tfmulti.notebook.launching import notebook_launch

__all__ = ["notebook_launch"]
