"""The use of this host's processor, memory and GPUs; imports no TensorFlow."""

from tfmulti.hardware.gpus import Gpus as Gpus
from tfmulti.hardware.gpus import list_uuids as list_uuids
from tfmulti.hardware.gpus import read_driver as read_driver
from tfmulti.hardware.sampler import NAMES as NAMES
from tfmulti.hardware.sampler import Processor as Processor
from tfmulti.hardware.sampler import Sampler as Sampler
from tfmulti.hardware.sampler import describe as describe
from tfmulti.hardware.sampler import describe_imbalance as describe_imbalance
from tfmulti.hardware.sampler import find_readers as find_readers
from tfmulti.hardware.sampler import summarize as summarize
