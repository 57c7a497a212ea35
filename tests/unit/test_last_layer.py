"""The last layer only at the last tokens: the same states for less work."""

import pytest
import torch
from test_prefix import PROMPT, TEXTS

from pgra.lm.causal_lm import CausalLM
from pgra.lm.kernels import LastLayer
from pgra.lm.prefix import PromptedEncoder


@pytest.mark.parametrize("sharing", ["cascade", "packed"])
def test_states_are_those_of_the_whole_layer(lm_dir, sharing):
    lm = CausalLM.from_name(str(lm_dir))
    short = PromptedEncoder(lm, PROMPT, sharing=sharing)
    whole = PromptedEncoder(lm, PROMPT, sharing=sharing)
    assert short.way == whole.way
    whole._behind.is_short = False
    torch.testing.assert_close(short.encode(TEXTS), whole.encode(TEXTS), rtol=1e-4, atol=1e-5)


def feed_forward(lm, layer):
    block = (getattr(lm.model, "decoder", lm.model)).get_submodule("layers")[layer]
    return block.fc1 if hasattr(block, "fc1") else block.mlp


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_the_last_feed_forward_part_sees_one_token_a_text(lm_dirs, kind):
    lm = CausalLM.from_name(str(lm_dirs[kind]))
    encoder = PromptedEncoder(lm, PROMPT, sharing="packed")
    encoder.encode(TEXTS)
    seen = []
    for layer in (0, 1):
        inner = next(
            module
            for module in feed_forward(lm, layer).modules()
            if isinstance(module, torch.nn.Linear)
        )
        inner.register_forward_hook(lambda _, __, out: seen.append(out.flatten(0, -2).shape))
    encoder.num_tokens = 0
    encoder.encode(TEXTS)
    first, last = (sum(shape[0] for shape in seen[i::2]) for i in (0, 1))
    assert last == len(TEXTS)
    assert first >= encoder.num_tokens > 5 * last


def test_outside_the_whole_layer_runs(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["llama"]))
    ids = torch.tensor([lm.tokenize(["The film is a warm and funny portrait."])[0]])
    truth = lm.model(input_ids=ids).last_hidden_state
    last = LastLayer(lm.model)
    with last.only_at(torch.tensor([3])):
        shortened = lm.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(shortened[0, 3], truth[0, 3])
    assert not torch.allclose(shortened[0, 4], truth[0, 4])
    torch.testing.assert_close(lm.model(input_ids=ids).last_hidden_state, truth)


def test_a_model_without_known_parts_runs_whole():
    class Bare(torch.nn.Module):
        class config:
            num_hidden_layers = 2

        def forward(self, x):
            return x + 1

    model = Bare()
    with LastLayer(model).only_at(torch.tensor([0])):
        assert model(torch.zeros(1)).item() == 1
