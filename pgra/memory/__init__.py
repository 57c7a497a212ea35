"""A memory of what users corrected, and its use in an LM's prompt (Madaan et al. 2022)."""

from dataclasses import dataclass

from pgra.config import Arguments, arg


@dataclass(kw_only=True)
class GeneratorArguments(Arguments):
    """How the generator is trained."""

    model: str = arg("google-t5/t5-small", "Seq2seq model to start from: hub id, folder, bundled.")
    num_train_epochs: int = arg(20, "How often each pair is seen.", least=1)
    per_device_train_batch_size: int = arg(16, "Pairs a step.", least=1)
    learning_rate: float = arg(1e-3, "Adafactor's, constant, as T5's authors fine-tune.", above=0)
    save_steps: int = arg(
        200, "Steps between checkpoints that a killed training resumes from.", least=1
    )
    seed: int = arg(0, "Of the order of the pairs, and of dropout.")


@dataclass(kw_only=True)
class SimilarityArguments(Arguments):
    """How the layer is trained."""

    target: str = arg(
        "feedback",
        "What the cosine of two questions is to be: feedback (that of their feedback: the paper's "
        "A.2), or type (1 for one type, 0 for others: the release's semantic memory).",
        choices=("feedback", "type"),
    )
    encoder: str = arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder below the layer: hub id, folder or bundled:NAME. It stays as it is.",
    )
    key_form: str = arg(
        "slotless",
        "What is read of a question: slotless (without <...>), or whole.",
        choices=("slotless", "whole"),
    )
    width: int = arg(256, "Of the layer, with tanh after it (the release: 256).", least=1)
    num_steps: int = arg(500, "Steps, each over all pairs of a batch.", least=1)
    batch_size: int = arg(128, "Questions a step.", least=2)
    learning_rate: float = arg(1e-3, "Adam's.", above=0)
    seed: int = arg(0, "Of the layer's first weights and of the batches.")
