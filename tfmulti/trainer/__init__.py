"""Trains a model on a dataset under a strategy, and writes what came of it."""

from tfmulti.config import TrainConfig as TrainConfig
from tfmulti.trainer.loop import train_and_evaluate as train_and_evaluate
from tfmulti.trainer.worker import digest_weights as digest_weights
