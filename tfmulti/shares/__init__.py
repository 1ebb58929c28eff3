"""What one replica received of a step: its share of the global batch.

`strategy.run` surrounds each of Keras's steps with this. A share without a row would end the
process in a convolution on CPU (oneDNN), so it gets one filler row, whose traces are removed:
from gradients by tapes (`tfmulti.gradients`), from metrics and layer state here, from
synchronized batch statistics in `keras_compat`.
"""

from tfmulti.shares.logs import add_by_dtype as add_by_dtype
from tfmulti.shares.logs import note_result as note_result
from tfmulti.shares.logs import weigh_mean as weigh_mean
from tfmulti.shares.rows import Counted as Counted
from tfmulti.shares.rows import fill_if_empty as fill_if_empty
from tfmulti.shares.rows import without_count as without_count
from tfmulti.shares.share import Share as Share
from tfmulti.shares.share import current_share as current_share
from tfmulti.shares.share import holding as holding
from tfmulti.shares.steps import guard as guard
from tfmulti.shares.steps import share_whole_batch as share_whole_batch
