"""Where the time of a step goes, what bounds the job, and what to try."""

from __future__ import annotations

import dataclasses

INPUT, COMPUTE, COMMUNICATION, HOST = "input", "compute", "communication", "host"
_INPUT_SHARE = 0.5
_SHARE = 0.2
ADVICE = {
    INPUT: "Make the source faster: map with num_parallel_calls=tf.data.AUTOTUNE, cache(), "
    "decode less, store prepared examples; then measure again.",
    COMPUTE: "More workers help. Within one: mixed_bfloat16 where the processor has it, "
    "or a smaller model.",
    COMMUNICATION: "Try --communication mpi, DistributedOptimizer(compression='bfloat16'), a "
    "larger batch per replica, or gradient_accumulation_steps.",
    HOST: "Raise steps_per_execution, or the batch size.",
}


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The parts of a step with one step a call, in seconds; they add to the step.

    Attributes:
        input: Drawing a batch from the same pipeline, measured alone, without training; at most
            the control's step.
        compute: The control's step with several steps a call, without the input. The control
            is as many one-device processes at once that do not communicate.
        reduction: The step with several steps a call beyond the control's.
        host: What one step a call costs beyond several: Keras's and Python's own work.
    """

    input: float
    compute: float
    reduction: float
    host: float

    @property
    def step(self) -> float:
        """The sum of the parts."""
        return self.input + self.compute + self.reduction + self.host

    @property
    def bound_by(self) -> str:
        """What bounds the job.

        Input where drawing a batch takes half of a step; else communication, and else the host,
        where it is a fifth; else compute.

        >>> Breakdown(input=1.0, compute=60.0, reduction=40.0, host=1.0).bound_by
        'communication'
        """
        if self.input >= _INPUT_SHARE * self.step:
            return INPUT
        if self.reduction >= _SHARE * self.step:
            return COMMUNICATION
        return HOST if self.host >= _SHARE * self.step else COMPUTE


def break_down(single: float, several: float, control: float, input_alone: float) -> Breakdown:
    """Divides a step.

    What noise makes negative is 0, and the part before it is smaller by as much.

    Args:
        single: Seconds of a step with one step a call.
        several: The same with several steps a call.
        control: Seconds of a step of the control with several steps a call.
        input_alone: Seconds to draw one batch.

    >>> break_down(single=12.0, several=10.0, control=8.0, input_alone=1.0)
    Breakdown(input=1.0, compute=7.0, reduction=2.0, host=2.0)
    """
    several = min(several, single)
    control = min(control, several)
    drawn = min(input_alone, control)
    return Breakdown(drawn, control - drawn, several - control, single - several)
