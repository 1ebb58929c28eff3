"""`python -m tfmulti.parity`: whether many devices give a model one device's result."""

from tfmulti.parity.config import ParityConfig as ParityConfig
