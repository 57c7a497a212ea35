"""Methods, each a file that reads like its paper."""
