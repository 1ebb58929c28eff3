"""The faults of `make faults`; the quick ones in every run."""

import pytest

from faults.scenarios import SCENARIOS

IN_EVERY_RUN = ["an exception in one pipeline", "models that differ"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in SCENARIOS
    ],
)
def test_a_fault_ends_as_it_must(name, tmp_path):
    if SCENARIOS[name](tmp_path) is None:
        pytest.skip("needs the right to mount a small file system")
