import keras
import pytest

from tfmulti.train.learning_rate import ScaledSchedule, scale_learning_rate


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_by_the_rule_with_the_batch(rule, rate):
    assert scale_learning_rate(0.1, 1024, base_batch_size=256, rule=rule) == pytest.approx(rate)


def test_warm_up_rises_from_the_base_rate_by_the_same_amount():
    schedule = scale_learning_rate(
        0.1, 1024, base_batch_size=256, warmup_epochs=2, steps_per_epoch=3
    )
    rates = [float(schedule(step)) for step in range(8)]
    assert rates == pytest.approx([0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4])


def test_warm_up_without_scaling_rises_from_zero():
    schedule = scale_learning_rate(0.1, 64, rule="none", warmup_epochs=1, steps_per_epoch=4)
    assert [float(schedule(step)) for step in range(5)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1]
    )


def test_it_goes_around_any_schedule_and_through_a_config():
    cosine = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=100)
    schedule = scale_learning_rate(
        cosine, 512, base_batch_size=256, warmup_epochs=1, steps_per_epoch=10
    )
    assert float(schedule(50)) == pytest.approx(2 * float(cosine(50)))
    again = ScaledSchedule.from_config(schedule.get_config())
    assert [float(again(step)) for step in (0, 5, 50)] == pytest.approx(
        [float(schedule(step)) for step in (0, 5, 50)]
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "cubic"}, "rule='cubic'"),
        ({"base_batch_size": 0}, "base_batch_size=0"),
        ({"warmup_epochs": 1}, "steps_per_epoch=None"),
        ({"warmup_epochs": -1, "steps_per_epoch": 3}, "warmup_epochs=-1"),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError) as caught:
        scale_learning_rate(0.1, 64, **settings)
    assert "Received: " in str(caught.value)
    assert words in str(caught.value)
