"""One worker of a cluster runs every field script: `python field_worker.py FOLDER`.

Leaves `worker_INDEX.npz` in the folder: the model's weights and the histories, by script.
"""

import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def run_all(strategy):
    """Returns arrays by name: `script/weight/NUMBER` and `script/history/KEY`."""
    import dcgan
    import image_classifier
    import keras
    import text_transformer
    import vae

    arrays = {}
    for script in (image_classifier, text_transformer, dcgan, vae):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model, history = script.main(strategy)
        name = script.__name__
        for number, weight in enumerate(model.weights):
            replicas = strategy.experimental_local_results(weight.value)
            arrays[f"{name}/weight/{number}"] = np.stack([value.numpy() for value in replicas])
        for key, values in history.items():
            arrays[f"{name}/history/{key}"] = np.array(values)
    return arrays


def main(folder):
    import tfmulti

    strategy = tfmulti.create_strategy("multi_worker")
    index = strategy.cluster_resolver.task_id
    np.savez(Path(folder) / f"worker_{index}.npz", **run_all(strategy))


if __name__ == "__main__":
    main(sys.argv[1])
