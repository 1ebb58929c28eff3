"""Trains models whose parts are on several workers beside copies of them, and compares both."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import keras
import numpy as np

import tfmulti
from tfmulti import topology

WAYS = ("created in parts", "created as a whole")


def apart(one, other):
    """The largest difference between the weights of two models."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def usual_optimizer():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def usual_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a program of workers makes and trains its models.

    A case is a dict with `model`, a function, and where they are not the usual ones `copies`, the
    model of the copies; `optimizer` and `loss`, functions; `metrics` and `compile`; `x`, `y` and
    `global_batch_size`; `later`, which changes a model before it is compiled; `callbacks`, a
    function, with which `fit` also evaluates.

    Attributes:
        divide: Function of a strategy, a model and its case, which gives parts of the model to
            workers.
        held: Function of a model: what this worker has of it.
        x: The usual inputs.
        y: The usual labels.
    """

    divide: Callable
    held: Callable
    x: np.ndarray
    y: np.ndarray

    def create(self, strategy, case, way, seed=1):
        """Creates a model by `way`: `"copies"`, or divided, as one of `WAYS`."""
        keras.utils.set_random_seed(seed)
        is_copy, in_parts = way == "copies", way == WAYS[0]
        within = tfmulti.sharded_parameters() if in_parts else contextlib.nullcontext()
        with strategy.scope(), within:
            model = (case.get("copies", case["model"]) if is_copy else case["model"])()
            if not is_copy:
                model = self.divide(strategy, model, case)
            case.get("later", lambda model: None)(model)
            optimizer = case.get("optimizer", usual_optimizer)()
            model.compile(
                tfmulti.DistributedOptimizer(optimizer, shard=None if is_copy else "parameters"),
                case.get("loss", usual_loss)(),
                metrics=case.get("metrics", ["accuracy"]),
                **case.get("compile", {}),
            )
        return model

    def batches(self, strategy, case):
        """The rows of a case, for `fit`."""
        rows, size = self._rows(case), case.get("global_batch_size", 16)
        return tfmulti.distribute_train(rows, strategy, size, seed=3)

    def _rows(self, case):
        return case.get("x", self.x), case.get("y", self.y)

    def train(self, strategy, case, ways=WAYS[:1]):
        """How far divided models are from copies after two epochs, in weights and logs."""
        seen = {"weights": [], "history": [], "held": []}
        # What copies do is verified in tests of their own.
        verify, strategy.verify = strategy.verify, "never"
        copies = self.create(strategy, case, "copies")
        expected = self._fit(strategy, case, copies)
        strategy.verify = verify
        for way in ways:
            model = self.create(strategy, case, way)
            found = self._fit(strategy, case, model)
            seen["weights"].append(apart(copies, model))
            apart_in = [abs(a - b) for key in expected for a, b in zip(expected[key], found[key])]
            seen["history"].append(max(apart_in))
            seen["held"].append(self.held(model))
        return seen

    def _fit(self, strategy, case, model):
        more = {}
        if "callbacks" in case:
            more = {"callbacks": case["callbacks"](), "validation_data": self._rows(case)}
        return model.fit(self.batches(strategy, case), epochs=2, verbose=0, **more).history

    def live(self, strategy, folder, case):
        """Trains, evaluates, predicts, saves, and resumes divided and from copies.

        Leaves `divided.keras` and `copies.keras` in the folder.
        """
        x, y = self._rows(case)

        def fitted(way, where, epochs=2, seed=1):
            model, data = self.create(strategy, case, way, seed), self.batches(strategy, case)
            checkpoint = tfmulti.callbacks.Checkpoint(folder / where, data)
            model.fit(data, epochs=epochs, verbose=0, callbacks=[checkpoint])
            return model

        whole, copies = fitted("divided", "whole", 4), fitted("copies", "copies")
        divided, seen = fitted("divided", "divided"), {}
        rows = tfmulti.distribute_eval((x, y), strategy, 16)
        pairs = zip(copies.evaluate(rows, verbose=0), divided.evaluate(rows, verbose=0))
        seen["evaluate"] = max(abs(a - b) for a, b in pairs)
        predictions = [each.predict(x, verbose=0) for each in (copies, divided)]
        seen["predict"] = float(np.abs(predictions[0] - predictions[1]).max())
        # All workers make the call, each with rows of its own.
        number = 4 + topology.worker_index(strategy)
        of_batch = divided.predict_on_batch(x[:number]) - predictions[0][:number]
        seen["predict_on_batch"] = float(np.abs(of_batch).max())
        if topology.is_chief(strategy):
            divided.save(folder / "divided.keras")
            copies.save(folder / "copies.keras")
            loaded = keras.models.load_model(folder / "divided.keras")
            seen["file"] = float(np.abs(np.asarray(loaded(x)) - predictions[0]).max())
        for where in ("divided", "copies"):
            seen[f"resumed from {where}"] = apart(whole, fitted("divided", where, 4, seed=9))
        return seen
