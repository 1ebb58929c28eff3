"""Keras callbacks that do the right thing on several replicas and workers."""

from tfmulti.callbacks.checkpoint import Checkpoint as Checkpoint
from tfmulti.callbacks.checkpoint import Preempted as Preempted
from tfmulti.callbacks.finite import NonFinite as NonFinite
from tfmulti.callbacks.finite import NonFiniteError as NonFiniteError
from tfmulti.callbacks.history import HistoryFile as HistoryFile
from tfmulti.callbacks.shard_audit import ShardAuditLog as ShardAuditLog
from tfmulti.callbacks.throughput import Throughput as Throughput
