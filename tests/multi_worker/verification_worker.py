"""Verifies a right and a wrong model on one worker of a cluster, and says what came of it."""

import json
import os
import sys
import warnings

import keras

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main():
    import tfmulti

    strategy = tfmulti.create_strategy(
        "multi_worker", logical_cpus=int(sys.argv[1]), communication=sys.argv[2]
    )
    import verification_cases as cases

    said = {}
    for name, make, loss, metrics in (
        ("right", cases.dense, cases.squares, [cases.MeanError]),
        ("own step", cases.CustomStep, "mse", []),
        ("wrong loss", cases.dense, cases.root_of_mean, []),
        ("wrong state", lambda: cases.dense(cases.RunningMean()), "mse", []),
        ("wrong metric", cases.dense, "mse", [cases.Largest]),
    ):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = make()
            optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
            model.compile(optimizer, loss=loss, metrics=[create() for create in metrics])
        x, y = cases.rows()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*not verified")
                data = tfmulti.distribute_train((x, y), strategy, 8, seed=0)
                model.fit(data, verbose=0)
                model.predict(x[:24], verbose=0, batch_size=8)
            said[name] = "trained"
        except ValueError as error:
            said[name] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
