"""Finds the numbers that a step compares with: labels that stand for none, phases, step counts."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfmulti.verification.dependencies import place_of

# Operations with two sides, and what to try for a number on one side: the values that lie on both
# sides of the limit.
_EQUALITIES = ("Equal", "NotEqual")
_ABOVE, _FROM = (0, 1), (-1, 0)
_ORDERINGS = {"Greater": _ABOVE, "LessEqual": _ABOVE, "GreaterEqual": _FROM, "Less": _FROM}
_MIRRORED = {"Greater": _FROM, "LessEqual": _FROM, "GreaterEqual": _ABOVE, "Less": _ABOVE}
# Operations that choose by a whole number: an entry of a table, a branch, bits.
_BITS = ("BitwiseAnd", "BitwiseOr")
_CHOOSING = ("GatherV2", "OneHot", "Case", "StatelessCase", *_BITS)
# Each number costs a few more steps. A longer constant is a table rather than a list of cases.
_MOST = 8
_MOST_AT_ONCE = 4
# How far from a limit that is no whole number, by its size and at least.
_APART, _LEAST_APART = 0.01, 1e-4


def find_compared_numbers(graph) -> list[float]:
    """Returns numbers with which a step compares rows or variables, or by which it chooses.

    A step that leaves out labels of -999, or changes at a phase of 2 or after 1,000 steps, holds
    this number in its graph. For limits, the numbers on both sides of the limit are returned.
    Comparisons in Keras's code count where they test for equality, since their number may be an
    argument of the user's, such as `ignore_class`.

    Args:
        graph: The graph of the step on one device.
    """
    found: dict[float, None] = {}
    for each in graph.get_operations():
        if each.type in _EQUALITIES:
            found.update(dict.fromkeys(_equal_to(each)))
        elif each.type in _CHOOSING and place_of(each):
            found.update(dict.fromkeys(_choices(each)))
        elif each.type in _ORDERINGS and place_of(each):
            found.update(dict.fromkeys(_around(each)))
        if len(found) >= _MOST:
            break
    return list(found)[:_MOST]


def _choices(operation) -> list[float]:
    """Returns the numbers by which an operation chooses, the last ones first."""
    if operation.type in _BITS:
        return [0.0, *(number for tensor in operation.inputs for number in _constants(tensor))]
    if operation.type == "OneHot":
        number = tf.get_static_value(operation.inputs[1])
    elif operation.type == "GatherV2":
        # A table of numbers; a matrix holds embeddings.
        table = operation.inputs[0]
        if table.shape.rank == 1 and (values := tf.get_static_value(table)) is not None:
            # One place of each value that it has.
            places = np.unique(values, return_index=True)[1][:_MOST]
            return [float(place) for place in sorted(places, reverse=True)]
        number = table.shape[0] if table.shape.rank == 1 else None
    else:
        number = len(operation.get_attr("branches"))
    return [float(each) for each in reversed(range(min(number or 0, _MOST)))]


def _equal_to(operation) -> list[float]:
    numbers = [number for tensor in operation.inputs for number in _constants(tensor)]
    # Keras and TensorFlow compare with 0 and 1 in many places, and labels and counters have these.
    return [each for each in numbers if each not in (0, 1) or place_of(operation)]


def _around(operation) -> list[float]:
    left, right = operation.inputs
    limits = [(number, _MIRRORED) for number in _constants(left)]
    limits += [(number, _ORDERINGS) for number in _constants(right)]
    found = []
    for number, steps in limits:
        if number == round(number):
            found += [number + apart for apart in steps[operation.type]]
        else:
            apart = max(_APART * abs(number), _LEAST_APART)
            found += [number - apart, number + apart]
    return found


def _constants(tensor) -> list[float]:
    if not (tensor.dtype.is_integer or tensor.dtype.is_floating):
        return []
    value = tf.get_static_value(tensor)
    if value is None or np.size(value) > _MOST_AT_ONCE:
        return []
    return [float(number) for number in np.ravel(value) if np.isfinite(number)]
