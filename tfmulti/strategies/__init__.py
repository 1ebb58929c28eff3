"""Creates `tf.distribute` strategies under which the stock `fit` of Keras 3 runs.

`create_strategy` is the only function a user needs. It returns a subclass of
`tf.distribute.MirroredStrategy`, `MultiWorkerMirroredStrategy`, `OneDeviceStrategy` or
`TPUStrategy` with three public methods repaired for Keras 3: `run`, `reduce` and
`experimental_distribute_dataset`. With `"parameter_server"` it returns a subclass of
`ParameterServerStrategy`, under which `train_async` trains instead of `fit`.
"""

from tfmulti import keras_compat
from tfmulti.strategies.factories import create_strategy as create_strategy

keras_compat.check_versions()
