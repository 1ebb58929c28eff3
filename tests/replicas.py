"""Strategies on the logical CPUs that conftest.py makes."""

import tfmulti


def create_strategy(num_replicas, **settings):
    """A strategy on the first logical CPUs; one device's where it is one."""
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    kind = "mirrored" if num_replicas > 1 else "one_device"
    return tfmulti.create_strategy(kind, devices=devices, **settings)
