"""Strategies on the logical CPUs that conftest.py makes."""

import tfmulti


def create_strategy(num_replicas, **settings):
    """A strategy on the first logical CPUs; one device's where it is one.

    A step that differs in parts is an error: that every replica can compute the whole batch must
    not hide it.
    """
    settings.setdefault("on_difference", "error")
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    kind = "mirrored" if num_replicas > 1 else "one_device"
    return tfmulti.create_strategy(kind, devices=devices, **settings)
