"""The valid choices of flags and arguments."""

MODELS = ("cnn", "mlp")
OPTIMIZERS = ("adam", "adamw", "lamb", "lion", "momentum", "rmsprop", "sgd")
STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server", "tpu")
COMMUNICATIONS = ("auto", "ring", "nccl", "mpi")
COMPRESSIONS = ("bfloat16", "float16")
SHARDS = ("state", "parameters")
SPLITS = ("column", "row", "vocabulary")
SCALING_RULES = ("none", "linear", "sqrt")
ON_NONFINITE = ("stop", "skip")
RESUME = ("auto", "never")
TRACKERS = ("none", "wandb", "mlflow")
DTYPE_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
DEFAULT_GLOBAL_BATCH_SIZE = 64
# TensorFlow's own default.
DEFAULT_HEARTBEAT_TIMEOUT_S = 10.0
VERIFY = ("auto", "always", "never")
REPLICATE = "replicate"
ON_DIFFERENCE = (REPLICATE, "error")
AUTO = "auto"

_OF_CLUSTERS = ("multi_worker", "parameter_server")
_EXACT = ("mirrored", "one_device", "multi_worker", "tpu")
USED_WITH = {
    "devices": ("one_device", "mirrored"),
    "logical_cpus": ("mirrored", "one_device", "multi_worker"),
    "tf_config": _OF_CLUSTERS,
    "communication": ("multi_worker",),
    "bucket_bytes": ("multi_worker",),
    "start_timeout": _OF_CLUSTERS,
    "heartbeat_timeout": _OF_CLUSTERS,
    "on_difference": _EXACT,
    "distribute_optimizers": _EXACT,
}
"""The strategies that use an argument or a flag; "auto", which may choose them, accepts it too."""
