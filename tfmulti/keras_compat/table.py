"""What is replaced in Keras and TensorFlow, each with what it cures and what tells of its end.

Every entry acts where one of our strategies is in use, and else calls what was there. Its canary
in `tests/test_keras_compat.py` fails when upstream no longer needs the cure.
"""

from __future__ import annotations

from collections.abc import Callable

from tfmulti.keras_compat import table_runs, table_steps

TABLE = (*table_steps.ENTRIES, *table_runs.ENTRIES)


def install(**functions: Callable) -> None:
    """Installs every entry of the table that is not there yet.

    Args:
        **functions: What entries call, by the names in `Replacement.needs`; what each is given
            is told where its replacement is made.
    """
    for entry in TABLE:
        if entry.make is not None:
            entry.install(functions)
