"""One file a command: read arguments, call one pipeline, say what came out."""
