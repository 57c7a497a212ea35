"""Readers that know the answer: what they score and write is given, all around it is real."""

import math

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput


class _TokensAsEmbeddings(torch.nn.Module):
    """Embeddings that are the token ids themselves."""

    def forward(self, input_ids):
        return input_ids[..., None].float()


class _EmbeddingsAsStates(torch.nn.Module):
    """An encoder that passes its embeddings on."""

    def forward(self, inputs_embeds, attention_mask=None):
        return BaseModelOutput(last_hidden_state=inputs_embeds)


class ScriptedT5(T5ForConditionalGeneration):
    """A T5 whose next token has the chances that a script gives, by the query and what is written.

    All before the logits and all after is the project's own: packing, label scores, writing.
    """

    def __init__(self, tokenizer, script):
        small = {"d_model": 2, "d_kv": 1, "d_ff": 2, "num_layers": 1, "num_heads": 2}
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        special = {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": pad}
        super().__init__(T5Config(vocab_size=len(tokenizer), **small, **special))
        self.generation_config.use_cache = False  # so that it is shown all that it wrote
        self.tokens, self.states = _TokensAsEmbeddings(), _EmbeddingsAsStates()
        self.script = script

    def get_input_embeddings(self):
        return self.tokens

    def get_encoder(self, modality=None):
        return self.states

    def forward(self, encoder_outputs, attention_mask, decoder_input_ids, **kwargs):
        states = encoder_outputs.last_hidden_state[..., 0].long()
        logits = torch.full((*decoder_input_ids.shape, self.config.vocab_size), -1e4)
        for row, written in enumerate(decoder_input_ids.tolist()):
            example = row * len(states) // len(decoder_input_ids)  # several rows may be of one
            is_real = attention_mask[example].flatten().bool()
            query = tuple(states[example][is_real].tolist())
            for place in range(len(written)):
                for token, chance in self.script(query, tuple(written[1 : place + 1])).items():
                    logits[row, place, token] = math.log(chance)
        return Seq2SeqLMOutput(logits=logits)
