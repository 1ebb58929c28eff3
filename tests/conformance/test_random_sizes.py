"""Any number of examples, in batches of any size, on any number of replicas."""

import hypothesis
import keras
import pytest
from hypothesis import strategies as st
from replicas import create_strategy

from conformance import training
from conformance.guarantee import Origin
from conformance.guarantees import sizes
from conformance.test_conformance import judge

CASES = 60


@st.composite
def cases(draw):
    num_replicas = draw(st.integers(1, 4))
    guarantee = sizes.build(
        draw(st.integers(1, 300)),
        draw(st.integers(num_replicas, 100)),
        draw(st.sampled_from(list(sizes.OPTIMIZERS))),
        draw(st.sampled_from(sizes.REMAINDERS)),
        draw(st.booleans()),
        draw(st.integers(1, 2)),
    )
    return num_replicas, guarantee


@pytest.mark.slow
@hypothesis.settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(cases())
def test_any_numbers_of_rows_and_batches_give_one_devices_result(case):
    num_replicas, guarantee = case
    cell = judge(guarantee, training.attempt(guarantee, Origin(create_strategy(num_replicas))))
    assert cell.ok, f"{cell.text} {cell.where}"
    keras.utils.clear_session()
