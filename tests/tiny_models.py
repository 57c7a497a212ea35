"""Builds tiny models of every architecture, as folders that the real loaders read. No network."""

import json

import torch
from conftest import SENTENCES
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
)

_WORDS = (
    "negative positive terrible great The answer is Does the following sentence have a sentiment?"
)
_TEXTS = [*SENTENCES, _WORDS, "0123456789 ,.;:!?'\"-()\n\n" + "abcdefghijklmnopqrstuvwxyz" * 2]


def _saved(folder, tokenizer, **special):
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return fast


def _byte_level(folder, *, bos, eos, pad):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t in dict.fromkeys([pad, bos, eos]) if t]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return _saved(folder, tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)


def _word_piece(folder):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    split = tokenizer.pre_tokenizer.pre_tokenize_str(" ".join(_TEXTS).lower())
    words = {word for word, _ in split}
    letters = set("".join(words))
    pieces = letters | {f"##{letter}" for letter in letters} | words
    # not the library's trainer, which finds other pieces in each process
    vocabulary = {piece: number for number, piece in enumerate([*special, *sorted(pieces)])}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    ends = [(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return _saved(folder, tokenizer, **dict(zip(names, special, strict=True)))


def _unigram(folder, *, plain_slots=False):
    """Like T5's. In mT5's the slots are pieces like all others, not special tokens."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special, slots = ["<pad>", "</s>", "<unk>"], ["<extra_id_0>", "<extra_id_1>"]
    tokenizer.train_from_iterator(
        _TEXTS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    pieces = [
        (piece, round(score, 2))  # the rest of the digits differs between processes
        for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]
    ]
    pieces[3:] = sorted(pieces[3:])
    if plain_slots:
        pieces += [(f"▁{slot}", 0.0) for slot in reversed(slots)]
    tokenizer.model = models.Unigram(pieces, unk_id=2)
    if not plain_slots:
        tokenizer.add_special_tokens(slots)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    more = {} if plain_slots else {"extra_special_tokens": slots}
    return _saved(folder, tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", **more)


def _reader_tokenizer(folder, kind):
    if kind != "byt5":
        return _unigram(folder, plain_slots=kind == "mt5")
    bytewise = ByT5Tokenizer()  # no vocabulary, and Python alone
    bytewise.save_pretrained(folder)
    return bytewise


def _lively(model):
    """Give random weights enough spread that a wrong token or position shows in the output."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        elif "bias" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LMS = {  # model type, beginning of a text, and what it has of its own; opt-350m's is odd
    "gpt2": ("gpt2", None, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("llama", "<s>", {**_SIZE, "num_key_value_heads": 2, "intermediate_size": 64}),
    "opt": ("opt", "</s>", {**_SIZE, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "opt-350m": (
        "opt",
        "</s>",
        {**_SIZE, "ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "qwen2": ("qwen2", None, {**_SIZE, "num_key_value_heads": 2, "intermediate_size": 64}),
}


def build_lm(folder, kind, *, window=512, layers=2):
    """Write a causal LM of so many layers with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model_type, bos, own = _LMS[kind]
    tok = _byte_level(folder, bos=bos, eos="</s>", pad="<pad>")
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tok, name) for name in names}
    longest, depth = ("max_position_embeddings", "num_hidden_layers")
    if kind == "gpt2":
        longest, depth = ("n_positions", "n_layer")
    own = {**own, **ids, longest: window, depth: layers}
    config = AutoConfig.for_model(model_type, vocab_size=len(tok), **own)
    lm = _lively(AutoModelForCausalLM.from_config(config))
    if kind == "qwen2":  # its tokenizer brings one more token, <|endoftext|>
        lm.resize_token_embeddings(len(tok) + 1)
        for part in (lm.get_input_embeddings(), lm.get_output_embeddings()):
            part.weight.data[-1] = 0
    lm.save_pretrained(folder)
    return folder


def build_odd_lm(folder, kind):
    """Write a tiny LM of a rarer kind, with GPT-2's tokens."""
    build_lm(folder, "gpt2")
    size = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    wide = {**size, "num_key_value_heads": 2, "intermediate_size": 64, "sliding_window": 16}
    layers = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    how = {
        "bloom": size,
        "gemma2": {**wide, "head_dim": 8},
        "gpt_neo": {**layers, "hidden_size": 32, "window_size": 32, "max_position_embeddings": 512},
        "mamba": {"num_hidden_layers": 1, "hidden_size": 16, "state_size": 4},
        "mistral": wide,
    }[kind]
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, eos_token_id=1, **how)
    _lively(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return folder


def _encoder_config(tok, kind, **more):
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(tok), "pad_token_id": tok.pad_token_id}
    return AutoConfig.for_model(kind, **size, intermediate_size=32, **ids, **more)


def build_encoder(folder, kind="bert"):
    """Write a 2-layer encoder with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _encoder_config(_word_piece(folder), kind, max_position_embeddings=160)
    _lively(AutoModel.from_config(config)).save_pretrained(folder)
    return folder


def build_cross_encoder(folder, num_labels=1):
    """Write a 2-layer sequence classifier that reads pairs of texts."""
    folder.mkdir(parents=True, exist_ok=True)
    tok = _word_piece(folder)
    ends = [(t, tok.convert_tokens_to_ids(t)) for t in ("[CLS]", "[SEP]")]
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tok.save_pretrained(folder)
    config = _encoder_config(tok, "bert", max_position_embeddings=64, num_labels=num_labels)
    _lively(AutoModelForSequenceClassification.from_config(config)).save_pretrained(folder)
    return folder


def build_t5(folder, kind="t5"):
    """Write a tiny T5 with its tokenizer, in the shape and with the kind of folder of the real one.

    All but the original T5 have gated layers and a head of their own; flan's heads are narrower
    than the model (as flan-T5-small's), and most of ByT5's layers are the encoder's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tok = _reader_tokenizer(folder, kind)
    is_original = kind == "t5"
    config = AutoConfig.for_model(
        "mt5" if kind == "mt5" else "t5",
        vocab_size=len(tok),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3 if kind == "byt5" else 2,
        num_decoder_layers=1 if kind == "byt5" else 2,
        num_heads=3 if kind == "flan-t5" else 4,
        dropout_rate=0.1,
        pad_token_id=tok.pad_token_id,
        eos_token_id=tok.eos_token_id,
        decoder_start_token_id=tok.pad_token_id,
        feed_forward_proj="relu" if is_original else "gated-gelu",
        tie_word_embeddings=is_original,
    )
    torch.manual_seed(3)
    model = AutoModelForSeq2SeqLM.from_config(config)
    if not is_original:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) * 0.2)
    model.save_pretrained(folder)
    if not is_original:  # as the hub's folders say it, whatever this transformers writes
        path = folder / "config.json"
        saved = {**json.loads(path.read_text()), "tie_word_embeddings": False}
        saved.pop("scale_decoder_outputs", None)
        path.write_text(json.dumps(saved))
    return folder
