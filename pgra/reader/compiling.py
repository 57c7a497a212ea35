"""`--torch_compile`, an encoder block at a time.

The Trainer compiles a model whole. A reader's whole graph differs with each number of groups in a
batch, and was compiled anew for each, for minutes. Its encoder's blocks are alike, whatever the
batch: one of them is compiled once, for any shape ("regional compilation" in PyTorch's recipes).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from pgra.models.fid import FusionReader
from pgra.reader.arguments import ReaderTrainingArguments


@contextmanager
def compiled_blocks(
    reader: FusionReader, arguments: ReaderTrainingArguments, accelerator: Accelerator
) -> Iterator[None]:
    """Train with compiled blocks, where `--torch_compile` asks for it.

    Args:
        reader: Its modules and weights keep their names; afterwards it is as it was.
        arguments: Say with what backend and in what mode.
        accelerator: Made by the Trainer; it then compiles nothing itself.
    """
    blocks: list[Any] = []
    if arguments.torch_compile:
        accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
        blocks = list(reader.t5.get_encoder().block)
    for block in blocks:
        block.compile(
            dynamic=True,
            backend=arguments.torch_compile_backend,
            mode=arguments.torch_compile_mode,
        )
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
