"""One training, test or predict step on one replica, and that replica's rows of the global batch.

`strategy.run` wraps each Keras step with `wrap_step`. An empty replica batch would crash the
process in a convolution on CPU (oneDNN), so it gets one padding row. The effects of that row are
removed: from gradients by the tapes (`tfmulti.step.gradients`), from metrics and layer state by
`wrap_step`, and from synchronized batch statistics in `keras_compat`.
"""

from tfmulti.step.logs import note_result as note_result
from tfmulti.step.logs import weigh_mean as weigh_mean
from tfmulti.step.rows import Counted as Counted
from tfmulti.step.rows import as_current as as_current
from tfmulti.step.rows import current_replica_batch as current_replica_batch
from tfmulti.step.rows import fill_if_empty as fill_if_empty
from tfmulti.step.rows import without_count as without_count
from tfmulti.step.wrapped_step import divide_whole_batch as divide_whole_batch
from tfmulti.step.wrapped_step import wrap_step as wrap_step
