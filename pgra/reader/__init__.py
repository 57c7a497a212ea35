"""The Fusion-in-Decoder reader: inputs, batches, training and prediction."""

READER_FOLDER = "reader"  # of a run
RECORD_FILE = "pgra.json"  # in it
