"""A corpus of a few sentences in files, and how to index it and search it."""

from conftest import SENTENCES

from pgra.context import Context
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.retrieval import IndexRequest, find_retriever, open_retriever
from pgra.retrieval.base import RetrieverArguments
from pgra.retrieval.trec import find_docnos, write_run


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


class World:
    """Files, an encoder, and a folder for what is made; the corpus is `texts` unless named."""

    def __init__(self, root, encoder, texts=SENTENCES):
        self.root, self.encoder = root, encoder
        self.context = Context(artifacts=root / "artifacts", device="cpu", progress=False)
        self.one = self.write("one.txt", texts)

    def write(self, name, texts):
        path = self.root / name
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    def corpus(self, *files, **rules):
        sources = [str(path) for path in files or (self.one,)]
        return open_corpus(CorpusArguments(corpus=sources, **rules), self.context.artifacts)

    def args(self, name="dense", **changes):
        given = {"encoder": str(self.encoder), "num_candidates": 4, "shard_rows": 4, **changes}
        return RetrieverArguments(retriever=name, **given)

    def request(self, name="dense", *files, folder=None, rules=None, **changes):
        return IndexRequest(
            args=self.args(name, **changes),
            corpus=self.corpus(*files, **(rules or {})),
            context=self.context,
            output_dir=folder,
        )

    def build(self, name="dense", *files, **changes):
        return find_retriever(name).open(self.request(name, *files, **changes)).built

    def open(self, name="dense", *files, options=None, rules=None, **changes):
        corpus, args = self.corpus(*files, **(rules or {})), self.args(name, **changes)
        return open_retriever(args, corpus, self.context, options=options)

    def write_queries(self, name, queries):
        return self.write(name, [f"{query}\t{text}" for query, text in queries.items()])

    def write_run(self, name, queries, k):
        """Search with queries by id, and write what is found: passages are called by their rows."""
        found = self.open(num_candidates=k).retrieve(list(queries.values()), k)
        docnos = find_docnos(self.corpus(), found)
        write_run(self.root / name, queries, found, docnos, tag="test")
        return self.root / name

    def indexes(self):
        return sorted(p for p in (self.context.artifacts / "indexes").iterdir() if p.is_dir())
