"""Keras callbacks for several replicas and workers."""

from tfmulti import hardware as _hardware
from tfmulti.callbacks import throughput as _throughput
from tfmulti.callbacks.checkpoint import Checkpoint as Checkpoint
from tfmulti.callbacks.checkpoint import Preempted as Preempted
from tfmulti.callbacks.checks import NonFinite as NonFinite
from tfmulti.callbacks.checks import NonFiniteError as NonFiniteError
from tfmulti.callbacks.checks import ShardAuditLog as ShardAuditLog
from tfmulti.callbacks.devices import Devices as Devices
from tfmulti.callbacks.progress import Events as Events
from tfmulti.callbacks.progress import Progress as Progress
from tfmulti.callbacks.throughput import Throughput as Throughput
from tfmulti.callbacks.tracking import HistoryFile as HistoryFile
from tfmulti.callbacks.tracking import MlflowLogs as MlflowLogs
from tfmulti.callbacks.tracking import WandbLogs as WandbLogs

MEASURED = (*_throughput.NAMES, *_hardware.NAMES)
"""The names that monitors add to the logs, besides the metrics of the model."""
