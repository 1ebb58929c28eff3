"""One training, test or predict step on one replica, and that replica's rows of the global batch.

`strategy.run` wraps each Keras step with `wrapped_step.wrap_step`; `rows` has the current batch.
An empty replica batch would crash the process in a convolution on CPU (oneDNN), so it gets one
dummy row. The effects of that row are removed: from gradients by the tapes (`gradients`), from
metrics and layer state by `wrapped_step`, from losses by `logs`, and from synchronized batch
statistics in `keras_compat`.
"""
