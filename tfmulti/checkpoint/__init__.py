"""Checkpoints: the state of a training run, written atomically in several generations.

Values are written by TensorFlow's own bundle (`SaveV2`): it takes every dtype, has a checksum
for each tensor, writes without holding Python's lock, and loading runs no code. TensorFlow's
`Checkpoint` and Orbax, which use such files too, need the live variables while they write, and
determine the order in which a cluster reads them. Here the values are copied first, so that
training continues during the write.
"""

from tfmulti.checkpoint.generations import FILES as FILES
from tfmulti.checkpoint.generations import CheckpointError as CheckpointError
from tfmulti.checkpoint.generations import Generation as Generation
from tfmulti.checkpoint.generations import latest_good as latest_good
from tfmulti.checkpoint.generations import load as load
from tfmulti.checkpoint.generations import remove_all as remove_all
from tfmulti.checkpoint.generations import write as write
from tfmulti.checkpoint.state import Snapshot as Snapshot
from tfmulti.checkpoint.state import metric_variables as metric_variables
from tfmulti.checkpoint.state import put_back as put_back
from tfmulti.checkpoint.state import restore as restore
from tfmulti.checkpoint.state import take_snapshot as take_snapshot
