"""A transformer block of its own layers that tells two kinds of integer sequences apart."""

import keras
import numpy as np
from keras import layers, ops

import tfmulti

VOCAB_SIZE = 50
MAXLEN = 10
EMBED_DIM = 8
NUM_HEADS = 2
FF_DIM = 8


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        attended = self.dropout1(self.att(inputs, inputs))
        out1 = self.layernorm1(inputs + attended)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)


def load_data():
    """Sequences of different lengths, padded; the class is whether words above 25 prevail."""
    generator = np.random.default_rng(0)
    sequences = [
        generator.integers(1, VOCAB_SIZE, generator.integers(4, MAXLEN + 4)).tolist()
        for _ in range(70)
    ]
    y = np.array([np.mean(sequence) > VOCAB_SIZE / 2 for sequence in sequences], "int64")
    x = keras.utils.pad_sequences(sequences, maxlen=MAXLEN)
    return (x[:53], y[:53]), (x[53:], y[53:])


def main(strategy):
    (x_train, y_train), (x_val, y_val) = load_data()

    with strategy.scope():
        inputs = layers.Input(shape=(MAXLEN,))
        x = TokenAndPositionEmbedding(MAXLEN, VOCAB_SIZE, EMBED_DIM)(inputs)
        x = TransformerBlock(EMBED_DIM, NUM_HEADS, FF_DIM)(x)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.Dropout(0.1)(x)
        x = layers.Dense(8, activation="relu")(x)
        outputs = layers.Dense(2, activation="softmax")(x)
        model = keras.Model(inputs=inputs, outputs=outputs)
        model.compile(
            optimizer=tfmulti.DistributedOptimizer(keras.optimizers.Adam()),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    history = model.fit(
        x_train, y_train, batch_size=16, epochs=2, validation_data=(x_val, y_val), verbose=0
    )
    return model, history.history
