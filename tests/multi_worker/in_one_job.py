"""One worker runs cases of several programs: `python in_one_job.py FOLDER PROGRAM:CASE,...`.

Workers take longer to start than most cases take.
"""

import importlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cases
import fewer_imports  # noqa: F401
import keras


def run_case(strategy, folder, name):
    program, _, case = name.partition(":")
    keras.config.set_floatx("float32")
    # As it is where users leave it out.
    strategy.verify = "auto"
    place = folder / program
    place.mkdir(exist_ok=True)
    return importlib.import_module(program).run_case(strategy, place, case)


if __name__ == "__main__":
    cases.main(run_case)
