"""The Fusion-in-Decoder reader: inputs, batches, training and prediction."""
