"""What KATE's table 3 needs beside pgra: an encoder fine-tuned on SST-2, and IMDB's test reviews.

    python kate_table3.py    # roberta-large-sst2/ and imdb_test.jsonl; a GPU, and a network
    pgra ablate kate_t3

As the paper's appendix F: RoBERTa-large, by the GLUE script of transformers 2.7.0 (2e-5, batches of
32, three epochs, 128 tokens), a linear layer over the first token's state. `--sst2` and `--imdb`
also take jsonl files of sentence (or text) and label, 0 or 1. Guide: docs/icl.md.
"""

import argparse
from collections.abc import Mapping, Sequence

from datasets import Dataset, load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor, nn

from pgra.cli import run

LABELS = ("negative", "positive")


class Classify(nn.Module):
    """Cross-entropy of a linear layer over a sentence's vector."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(model.get_embedding_dimension(), len(LABELS))

    def forward(self, columns: Sequence[Mapping[str, Tensor]], labels: Tensor) -> Tensor:
        """Return the loss of a batch; its one column is the sentence."""
        vectors = self.model(columns[0])["sentence_embedding"]
        return nn.functional.cross_entropy(self.head(vectors), labels)


def load(name: str, config: str | None, split: str) -> Dataset:
    """Load a data set of the hub, or a jsonl file."""
    if name.endswith(".jsonl"):
        return load_dataset("json", data_files=name, split="train")
    return load_dataset(name, config, split=split)


def train_encoder(model_name: str, train: Dataset, folder: str, max_steps: int) -> None:
    """Fine-tune an encoder to classify sentences, and save it with its pooling."""
    transformer = Transformer(model_name, max_seq_length=128)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="cls")
    model = SentenceTransformer(modules=[transformer, pooling])
    args = SentenceTransformerTrainingArguments(
        output_dir=folder,
        learning_rate=2e-5,
        per_device_train_batch_size=32,
        num_train_epochs=3,
        max_steps=max_steps,
        save_strategy="no",
        dataloader_pin_memory=False,
        report_to="none",
    )
    columns = train.select_columns(["sentence", "label"])
    SentenceTransformerTrainer(model, args, columns, loss=Classify(model)).train()
    model.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the encoder's folder and the reviews' file."""
    parser = argparse.ArgumentParser(description="Make what `pgra ablate kate_t3` needs.")
    parser.add_argument("--model", default="FacebookAI/roberta-large")
    parser.add_argument("--sst2", default="nyu-mll/glue")
    parser.add_argument("--imdb", default="stanfordnlp/imdb")
    parser.add_argument("--max_steps", type=int, default=-1)
    args = parser.parse_args(argv)
    reviews = load(args.imdb, None, "test")
    rows = [{"sentence": row["text"], "label": LABELS[row["label"]]} for row in reviews]
    Dataset.from_list(rows).to_json("imdb_test.jsonl")
    train = load(args.sst2, "sst2", "train")
    train_encoder(args.model, train, "roberta-large-sst2", args.max_steps)
    print("roberta-large-sst2/ and imdb_test.jsonl")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
