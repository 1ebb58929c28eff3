"""Trains a worker that makes spot checks: `python spot_check_worker.py LOGICAL_CPUS TRANSPORT`."""

import json
import os
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import tfmulti
from tfmulti.strategies import spot_checks

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import test_spot_checks as programs

FEEDS = {each.__name__: each for each in (programs.arrays, programs.dataset, programs.distributed)}


def run_case(strategy, feed, callbacks=(), make=programs.Step, **compiled):
    """Returns the warnings and what training gives, or what it ends with."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile("sgd", **compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            history = model.fit(**feed(strategy), epochs=3, callbacks=[*callbacks], verbose=0)
        except ValueError as error:
            return {"error": str(error)}
    told = [str(each.message) for each in caught if "From now on" in str(each.message)]
    weights = [weight.tolist() for weight in model.get_weights()[:2]]
    return {"told": told, "loss": history.history["loss"], "weights": weights}


def evaluate(strategy):
    """Returns the warnings, and the second result, of evaluating rows that come later."""
    strategy.on_difference = "replicate"
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = programs.Measures()
        model.compile("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.evaluate(programs.rare_rows(), verbose=0)
        result = model.evaluate(programs.rare_rows(), verbose=0)
    told = [str(each.message) for each in caught if "From now on" in str(each.message)]
    return {"told": told, "result": result}


def main(logical_cpus, communication):
    # All that are due, however little time there is.
    spot_checks._OF_FIRST = 1000.0
    strategy = tfmulti.create_strategy(
        "multi_worker", logical_cpus=int(logical_cpus), communication=communication
    )
    done = {}
    for name, feed in FEEDS.items():
        strategy.on_difference = "replicate"
        done[f"begins, {name}"] = run_case(strategy, feed, [programs.Switch(after=10)])
        strategy.on_difference = "error"
        done[f"error, {name}"] = run_case(strategy, feed, [programs.Switch(after=10)])
        done[f"stays, {name}"] = run_case(strategy, feed, make=programs.relu)
    done["evaluates"] = evaluate(strategy)
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
