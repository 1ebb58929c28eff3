"""Creates `tf.distribute` strategies under which the stock `fit` of Keras 3 runs.

`create_strategy` is the only function a user needs. It returns a subclass of
`tf.distribute.MirroredStrategy`, `MultiWorkerMirroredStrategy`, `OneDeviceStrategy` or
`TPUStrategy` with three public methods repaired for Keras 3: `run`, `reduce` and
`experimental_distribute_dataset`.
"""

from tfmulti import keras_compat
from tfmulti.strategies.factories import create_strategy as create_strategy

keras_compat.check_versions()
