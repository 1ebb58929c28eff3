"""A ResNet on images, with what usually goes with one.

Augmentation, synchronized batch normalization, label smoothing, mixed precision, and a learning
rate that is scaled with the batch size, warmed up and then lowered by a cosine.
"""

from __future__ import annotations

import dataclasses

import keras
from keras import layers

import tfmulti
from experiments import common

METRICS = ("loss", "val_loss", "val_accuracy")
COMPARISONS = (
    common.Comparison(
        "With augmentation, whose random numbers are another stream on each replica",
        setups=("one device", "two logical CPUs"),
    ),
    common.Comparison(
        "For equality, without augmentation",
        ("--noaugment", "--epochs=1", "--dtype_policy=float64"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    dataset: str = common.flag("digits", "digits, or a tensorflow-datasets name as cifar10.")
    epochs: int = common.flag(6, "Passes over the data.")
    learning_rate: float = common.flag(0.05, "Rate for the base batch size.")
    base_batch_size: int = common.flag(32, "Batch size for which the rate was tuned.")
    warmup_epochs: float = common.flag(1.0, "Epochs of gradual warm-up.")
    label_smoothing: float = common.flag(0.1, "Part of the label given to all classes.")
    model: str = common.flag("small", "The network.", ("small", "resnet50"))
    filters: str = common.flag("16,32,64", "Filters of each residual block of the small network.")
    image_size: int = common.flag(
        16, "Height and width that images are brought to; 32 and more for resnet50."
    )
    num_classes: int = common.flag(10, "Classes.")
    augment: bool = common.flag(True, "Move, turn and zoom the images in training.")


def augmentation(settings: Settings) -> list:
    """Returns the layers that change images in training only."""
    if not settings.augment:
        return []
    sides = {"fill_mode": "nearest", "data_format": "channels_last"}
    return [
        layers.RandomTranslation(0.1, 0.1, **sides),
        layers.RandomRotation(0.03, **sides),
        layers.RandomZoom(0.1, **sides),
    ]


def _convolution(x, filters, kernel, strides=1):
    # No bias: batch normalization would take it away again.
    x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)(x)
    # Keras's momentum of 0.99 needs more steps than a short run has.
    return layers.BatchNormalization(momentum=0.9, synchronized=True)(x)


def small_resnet(x, block_filters, num_classes):
    """Residual blocks (He et al., 2015, arXiv 1512.03385), all but the first of stride 2."""
    x = layers.Activation("silu")(_convolution(x, block_filters[0], 3))
    for number, filters in enumerate(block_filters):
        strides = 2 if number else 1
        y = layers.Activation("silu")(_convolution(x, filters, 3, strides))
        y = _convolution(y, filters, 3)
        if strides > 1:
            x = _convolution(x, filters, 1, strides)
        x = layers.Activation("silu")(layers.Add()([x, y]))
    return layers.Dense(num_classes, dtype=head_dtype())(layers.GlobalAveragePooling2D()(x))


def head_dtype() -> str:
    """Logits stay in full precision where the rest is in half."""
    return keras.config.dtype_policy().variable_dtype


def resnet50(shape, num_classes):
    """Keras's ResNet-50 without weights, each of its batch normalizations synchronized."""

    def synchronize(layer):
        config = layer.get_config()
        if isinstance(layer, layers.BatchNormalization):
            config["synchronized"] = True
        return type(layer).from_config(config)

    model = keras.applications.ResNet50(
        weights=None, input_shape=shape, classes=num_classes, classifier_activation=None
    )
    return keras.models.clone_model(model, clone_function=synchronize)


def create_model(shape, settings: Settings) -> keras.Model:
    """Creates the network; gives logits."""
    size = settings.image_size
    inputs = x = keras.Input(shape)
    resizing = layers.Resizing(size, size, data_format="channels_last")
    for layer in [resizing, *augmentation(settings)]:
        x = layer(x)
    if settings.model == "resnet50":
        outputs = resnet50((size, size, shape[-1]), settings.num_classes)(x)
    else:
        outputs = small_resnet(
            x, [int(n) for n in settings.filters.split(",")], settings.num_classes
        )
    return keras.Model(inputs, outputs)


def smoothed_loss(settings: Settings):
    """Returns cross-entropy of integer labels with label smoothing, one number an example."""

    def loss(y_true, y_pred):
        labels = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), settings.num_classes)
        return keras.losses.categorical_crossentropy(
            labels, y_pred, from_logits=True, label_smoothing=settings.label_smoothing
        )

    return loss


def create_optimizer(settings: Settings, steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """SGD with momentum; the rate grows with the batch size, rises first, and falls to 0."""
    cosine = keras.optimizers.schedules.CosineDecay(
        settings.learning_rate, settings.epochs * steps_per_epoch
    )
    rate = tfmulti.scale_learning_rate(
        cosine,
        settings.global_batch_size,
        base_batch_size=settings.base_batch_size,
        warmup_epochs=settings.warmup_epochs,
        steps_per_epoch=steps_per_epoch,
    )
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def train(settings: Settings):
    """Trains on every device of this job; returns what was measured, and the weights."""
    strategy = tfmulti.create_strategy(settings.strategy, logical_cpus=settings.logical_cpus)
    keras.utils.set_random_seed(settings.seed)
    keras.config.set_dtype_policy(settings.dtype_policy)
    train_split, test_split = tfmulti.load_dataset(settings.dataset)
    data = tfmulti.distribute_train(
        train_split, strategy, settings.global_batch_size, seed=settings.seed
    )
    with strategy.scope():
        model = create_model(data.element_spec[0].shape[1:], settings)
        optimizer = create_optimizer(settings, int(data.cardinality()))
        model.compile(
            tfmulti.DistributedOptimizer(optimizer), smoothed_loss(settings), metrics=["accuracy"]
        )
    history = model.fit(
        data,
        validation_data=tfmulti.distribute_eval(test_split, strategy, settings.global_batch_size),
        epochs=settings.epochs,
        callbacks=[tfmulti.callbacks.Throughput(data)],
        verbose=common.verbose(),
    )
    return common.last_metrics(history), model.get_weights()


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
