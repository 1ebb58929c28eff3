"""`python -m tfmulti.parity`: proves for a model that many devices give one device's result."""

from tfmulti.parity.config import ParityConfig as ParityConfig
