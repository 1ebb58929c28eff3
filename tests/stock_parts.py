"""A small model around every public layer, loss, metric and optimizer of Keras."""

import functools

import numpy as np
import tensorflow as tf
from keras import layers

NUM_ROWS = 22
_rng = np.random.RandomState(0)


def _normal(*shape):
    return _rng.normal(size=(NUM_ROWS, *shape)).astype("float32")


def _distribution(size):
    positive = np.abs(_normal(size)) + 0.1
    return positive / positive.sum(axis=1, keepdims=True)


INPUTS = {
    "flat": _normal(6),
    "sequence": _normal(5, 4),
    "image": _normal(8, 8, 3),
    "volume": _normal(4, 4, 4, 2),
    "volumes": _normal(2, 3, 3, 3, 2),
    "pixels": _rng.randint(0, 255, (NUM_ROWS, 8, 8, 3)).astype("float32"),
    "numbers": _rng.randint(0, 9, (NUM_ROWS, 5)),
    "texts": tf.constant([[["a b", "c"][i % 2]] for i in range(NUM_ROWS)]),
}
TARGETS = {
    "binary": (_normal(3) > 0).astype("float32"),
    "one hot": np.eye(3, dtype="float32")[_rng.randint(0, 3, NUM_ROWS)],
    "class": _rng.randint(0, 3, NUM_ROWS),
    "positive": np.abs(_normal(3)) + 0.1,
    "sign": np.sign(_normal(3)),
    "real": _normal(3),
    "distribution": _distribution(3),
}


def _by_size(rows):
    """Sorts rows, so that each replica gets others than its neighbours."""
    return rows[np.argsort(rows.reshape(NUM_ROWS, -1).sum(axis=1), kind="stable")]


def _fade(rows):
    """Makes rows quieter and quieter, down to a thousandth."""
    return rows * np.logspace(0, -3, NUM_ROWS, dtype="float32").reshape(-1, *[1] * (rows.ndim - 1))


# Rows and targets that are so unlike that the replicas of a batch have nothing in common.
UNLIKE_INPUTS = {
    **{name: _fade(INPUTS[name]) for name in ("flat", "sequence", "image", "volume", "volumes")},
    "pixels": np.round(_fade(INPUTS["pixels"])),
    "numbers": _by_size(INPUTS["numbers"]),
    "texts": tf.constant([["a b " * (i % 8) + "c"] for i in range(NUM_ROWS)]),
}
UNLIKE_TARGETS = {
    **{name: _by_size(TARGETS[name]) for name in ("binary", "class")},
    "one hot": np.eye(3, dtype="float32")[_by_size(TARGETS["class"])],
    **{name: _fade(TARGETS[name]) for name in ("positive", "real")},
    # Of these 0 is not -1, which is not on all replicas.
    "sign": np.where(np.arange(NUM_ROWS) % 8 < 2, -1, TARGETS["binary"].T).T.astype("float32"),
    "distribution": np.eye(3, dtype="float32")[_by_size(TARGETS["class"])],
}
ROWS = {"alike": (INPUTS, TARGETS), "unlike": (UNLIKE_INPUTS, UNLIKE_TARGETS)}
_BY_RANK = {1: "sequence", 2: "image", 3: "volume"}


def _by_rank(pattern, ranks=(1, 2, 3), **settings):
    """Returns parts such as `Conv1D`, each with the input of its rank."""
    return {pattern.format(n): (_BY_RANK[n], {**settings}) for n in ranks}


# Each layer's input, its arguments, and a function that makes something of the layer.
LAYERS = {
    "Activation": ("flat", {"activation": "tanh"}),
    "ActivityRegularization": ("flat", {"l1": 0.01, "l2": 0.02}),
    **_by_rank("AdaptiveAveragePooling{}D", output_size=2),
    **_by_rank("AdaptiveMaxPooling{}D", output_size=2),
    "AutoContrast": ("pixels", {}),
    **_by_rank("AveragePooling{}D", pool_size=2),
    "BatchNormalization": ("flat", {"synchronized": True}),
    "Bidirectional": ("sequence", {"layer": functools.partial(layers.LSTM, 3)}),
    "CategoryEncoding": ("numbers", {"num_tokens": 9, "output_mode": "count"}),
    "CenterCrop": ("pixels", {"height": 5, "width": 5}),
    "ContrastLimitedAdaptiveHistogramEqualization": ("pixels", {}),
    **_by_rank("Conv{}D", filters=3, kernel_size=2),
    **_by_rank("Conv{}DTranspose", filters=3, kernel_size=2),
    "ConvLSTM1D": ("image", {"filters": 2, "kernel_size": 3}),
    "ConvLSTM2D": ("volume", {"filters": 2, "kernel_size": 2}),
    "ConvLSTM3D": ("volumes", {"filters": 2, "kernel_size": 2}),
    **_by_rank("Cropping{}D", cropping=1),
    "Dense": ("flat", {"units": 3}),
    **_by_rank("DepthwiseConv{}D", (1, 2), kernel_size=2),
    "Discretization": ("flat", {"bin_boundaries": [-0.5, 0.0, 0.5]}),
    "ELU": ("flat", {}),
    "EinsumDense": ("sequence", {"equation": "abc,cd->abd", "output_shape": (5, 3)}),
    "Embedding": ("numbers", {"input_dim": 9, "output_dim": 3}),
    "Equalization": ("pixels", {}),
    "Flatten": ("sequence", {}),
    "GRU": ("sequence", {"units": 3}),
    **_by_rank("GlobalAveragePooling{}D"),
    **_by_rank("GlobalMaxPooling{}D"),
    "GroupNormalization": ("image", {"groups": 2}),
    "Hashing": ("texts", {"num_bins": 4}),
    "Identity": ("flat", {}),
    "IntegerLookup": ("numbers", {"vocabulary": [1, 2, 3]}),
    "LSTM": ("sequence", {"units": 3}),
    "LayerNormalization": ("flat", {}),
    "LeakyReLU": ("flat", {}),
    "Masking": ("sequence", {}),
    **_by_rank("MaxPooling{}D", pool_size=2),
    "Normalization": ("flat", {"mean": [0.5] * 4, "variance": [2.0] * 4}),
    "PReLU": ("flat", {}),
    "Permute": ("sequence", {"dims": (2, 1)}),
    "Pipeline": ("pixels", {"layers": lambda: [layers.Rescaling(0.1), layers.Rescaling(2.0)]}),
    "RMSNormalization": ("flat", {}),
    "ReLU": ("flat", {"max_value": 0.8, "negative_slope": 0.1, "threshold": 0.1}),
    "RepeatVector": ("flat", {"n": 3}),
    "Rescaling": ("flat", {"scale": 2.0, "offset": 1.0}),
    "Reshape": ("flat", {"target_shape": (2, 2)}),
    "Resizing": ("pixels", {"height": 5, "width": 5}),
    "ReversibleEmbedding": ("numbers", {"input_dim": 9, "output_dim": 3}),
    "STFTSpectrogram": (
        "sequence",
        {
            **{"frame_length": 4, "frame_step": 2, "fft_length": 4},
            # The logarithm of numbers near 0 amplifies rounding.
            **{"window": None, "mode": "magnitude"},
        },
    ),
    **_by_rank("SeparableConv{}D", (1, 2), filters=3, kernel_size=2),
    "SimpleRNN": ("sequence", {"units": 3}),
    "Softmax": ("flat", {}),
    "Solarization": ("pixels", {}),
    "SpectralNormalization": ("flat", {"layer": functools.partial(layers.Dense, 3)}),
    "StringLookup": ("texts", {"vocabulary": ["a b"]}),
    "TextVectorization": ("texts", {"vocabulary": ["a", "b"], "output_sequence_length": 3}),
    "TimeDistributed": ("sequence", {"layer": functools.partial(layers.Dense, 3)}),
    "UnitNormalization": ("flat", {}),
    "UpSampling1D": ("sequence", {}),
    "UpSampling2D": ("image", {}),
    "UpSampling3D": ("volume", {}),
    **_by_rank("ZeroPadding{}D"),
}
# Layers of two inputs; those of attention take them as two arguments.
PAIRS = {
    **dict.fromkeys(("Add", "Average", "Concatenate", "Maximum", "Minimum"), ("flat", {})),
    **dict.fromkeys(("Multiply", "Subtract"), ("flat", {})),
    "Dot": ("flat", {"axes": 1}),
    "HashedCrossing": ("texts", {"num_bins": 4}),
    **dict.fromkeys(("AdditiveAttention", "Attention"), ("sequence", {})),
    "MultiHeadAttention": ("sequence", {"num_heads": 2, "key_dim": 3}),
    "GroupQueryAttention": (
        "sequence",
        {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2},
    ),
}
# Cells run in an `RNN`.
CELLS = {
    "GRUCell": ("sequence", {"units": 3}),
    "LSTMCell": ("sequence", {"units": 3}),
    "SimpleRNNCell": ("sequence", {"units": 3}),
    "StackedRNNCells": ("sequence", {"cells": lambda: [layers.GRUCell(3), layers.LSTMCell(2)]}),
}
# These draw random numbers while they train, or amplify rounding; else they are as the others.
UNTRAINED = {
    "MelSpectrogram": (
        "flat",
        {
            **{"fft_length": 4, "sequence_length": 4, "sequence_stride": 2, "num_mel_bins": 2},
            **{"sampling_rate": 100, "min_freq": 1, "max_freq": 40},
        },
    ),
    **dict.fromkeys(("AlphaDropout", "Dropout", "GaussianDropout"), ("flat", {"rate": 0.5})),
    **_by_rank("SpatialDropout{}D", rate=0.5),
    "GaussianNoise": ("flat", {"stddev": 0.5}),
    **dict.fromkeys(("AugMix", "CutMix", "MixUp", "RandAugment"), ("pixels", {})),
    "RandomCrop": ("pixels", {"height": 8, "width": 8}),
    "RandomColorJitter": ("pixels", {"value_range": (0, 255), "brightness_factor": 0.3}),
    "RandomFlip": ("pixels", {}),
    "RandomElasticTransform": ("pixels", {}),
    "RandomErasing": ("pixels", {}),
    "RandomGaussianBlur": ("pixels", {}),
    "RandomGrayscale": ("pixels", {}),
    "RandomInvert": ("pixels", {}),
    "RandomPerspective": ("pixels", {}),
    "RandomShear": ("pixels", {"x_factor": 0.3}),
    "RandomTranslation": ("pixels", {"height_factor": 0.3, "width_factor": 0.3}),
    "RandomZoom": ("pixels", {"height_factor": 0.3}),
    "RandomHue": ("pixels", {"factor": 0.3, "value_range": (0, 255)}),
    "RandomPosterization": ("pixels", {"factor": 4}),
    **dict.fromkeys(
        "RandomBrightness RandomColorDegeneration RandomContrast RandomRotation RandomSaturation "
        "RandomSharpness".split(),
        ("pixels", {"factor": 0.3}),
    ),
}
LAYERS_NOT_TRIED = {
    "base classes": "InputLayer InputSpec Layer Wrapper RNN",
    "code of the user's or of other libraries, which is verified": (
        "FlaxLayer JaxLayer Lambda TFSMLayer TorchModuleWrapper"
    ),
    "bounding boxes": "MaxNumBoundingBoxes",
}

# Each loss's targets, and the activation of the outputs.
LOSSES = {
    **dict.fromkeys(("BinaryCrossentropy", "BinaryFocalCrossentropy"), ("binary", "sigmoid")),
    **dict.fromkeys(
        ("CategoricalCrossentropy", "CategoricalFocalCrossentropy"), ("one hot", "softmax")
    ),
    "CategoricalGeneralizedCrossEntropy": ("class", "softmax"),
    "CategoricalHinge": ("one hot", None),
    "Circle": ("class", None),
    **dict.fromkeys(("CosineSimilarity", "Huber", "LogCosh"), ("real", None)),
    **dict.fromkeys(("MeanAbsoluteError", "MeanSquaredError"), ("real", None)),
    **dict.fromkeys(("Dice", "Tversky"), ("binary", "sigmoid")),
    **dict.fromkeys(("Hinge", "SquaredHinge"), ("sign", "tanh")),
    "KLDivergence": ("distribution", "softmax"),
    "MeanAbsolutePercentageError": ("positive", None),
    "MeanSquaredLogarithmicError": ("positive", "relu"),
    "Poisson": ("positive", "softplus"),
    "SparseCategoricalCrossentropy": ("class", "softmax"),
}
LOSSES_NOT_TRIED = {"base classes": "Loss", "targets of sequences, in the matrix": "CTC"}

# As losses, with more arguments.
METRICS = {
    **dict.fromkeys(
        "AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU FalseNegatives FalsePositives "
        "Precision Recall TrueNegatives TruePositives".split(),
        ("binary", "sigmoid", {}),
    ),
    "PrecisionAtRecall": ("binary", "sigmoid", {"recall": 0.5}),
    "RecallAtPrecision": ("binary", "sigmoid", {"precision": 0.5}),
    "SensitivityAtSpecificity": ("binary", "sigmoid", {"specificity": 0.5}),
    "SpecificityAtSensitivity": ("binary", "sigmoid", {"sensitivity": 0.5}),
    "IoU": ("binary", "sigmoid", {"num_classes": 2, "target_class_ids": [0]}),
    "MeanIoU": ("binary", "sigmoid", {"num_classes": 2}),
    **dict.fromkeys(("CategoricalAccuracy", "CategoricalCrossentropy"), ("one hot", "softmax", {})),
    **dict.fromkeys(("F1Score", "FBetaScore"), ("one hot", "softmax", {"average": "macro"})),
    "OneHotIoU": ("one hot", "softmax", {"num_classes": 3, "target_class_ids": [0, 2]}),
    "OneHotMeanIoU": ("one hot", "softmax", {"num_classes": 3}),
    "TopKCategoricalAccuracy": ("one hot", "softmax", {"k": 2}),
    "CategoricalHinge": ("one hot", None, {}),
    **dict.fromkeys(
        "ConcordanceCorrelation CosineSimilarity LogCoshError MeanAbsoluteError "
        "MeanAbsolutePercentageError MeanSquaredError PearsonCorrelation R2Score "
        "RootMeanSquaredError".split(),
        ("real", None, {}),
    ),
    **dict.fromkeys(("Hinge", "SquaredHinge"), ("sign", None, {})),
    "KLDivergence": ("distribution", "softmax", {}),
    "MeanSquaredLogarithmicError": ("positive", "relu", {}),
    "Poisson": ("positive", "softplus", {}),
    **dict.fromkeys(
        ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"), ("class", "softmax", {})
    ),
    "SparseTopKCategoricalAccuracy": ("class", "softmax", {"k": 2}),
}
METRICS_NOT_TRIED = {"what metrics are made of": "Mean MeanMetricWrapper Metric Sum"}
