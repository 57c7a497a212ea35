import pytest
import torch
from torch import nn
from transformers import AutoModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from pgra.lm.kernels import MANY_TOKENS, Packer, packed_for, packed_linears
from pgra.reader.fid import FusionReader


@pytest.fixture
def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))


@pytest.mark.parametrize("shape", [(5, 16), (2, 7, 16), (1, 16)])
def test_packed_layers_give_what_plain_ones_give(module, shape):
    x = torch.randn(shape)
    plain = module(x)
    with packed_linears(module):
        packed = module(x)
    torch.testing.assert_close(packed, plain, atol=1e-6, rtol=1e-5)


def test_a_packed_layer_reads_its_copy_and_only_meanwhile(module):
    """The control: were the layers not packed, a changed weight would show at once."""
    x = torch.randn(5, 16)
    before = module(x)
    with packed_linears(module):
        with torch.no_grad():
            module[0].weight.zero_()
        torch.testing.assert_close(module(x), before, atol=1e-6, rtol=1e-5)
    assert (module(x) - before).abs().max() > 1e-2


def test_layers_are_plain_again_after_an_error(module):
    with pytest.raises(KeyError), packed_linears(module):
        raise KeyError
    loss = module(torch.randn(5, 16)).sum()
    loss.backward()
    assert module[0].weight.grad.abs().sum() > 0


def test_other_layers_are_left_alone(module):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    scaled, half = Scaled(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)
    for layer in (scaled, half):
        with packed_linears(layer):
            assert "forward" not in vars(layer)
    with torch.autocast("cpu", torch.bfloat16), packed_linears(module):
        assert "forward" not in vars(module[0])


def test_a_t5_reads_the_same_with_packed_weights(t5_dirs):
    for kind in ("t5", "t5-v1.1"):
        encoder = FusionReader.from_name(str(t5_dirs[kind])).model.get_encoder()
        ids = torch.arange(3, 27).view(3, 8)
        mask = torch.ones(3, 8, dtype=torch.bool)
        mask[1, 5:] = False
        plain = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        with packed_linears(encoder):
            is_fused = "forward" in vars(encoder.block[0].layer[-1])
            packed = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        assert is_fused == (kind == "t5-v1.1")
        torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoders_layers_bend_while_they_multiply_and_give_the_same(encoder_dirs, kind):
    model = AutoModel.from_pretrained(encoder_dirs[kind]).eval()
    ids = torch.arange(3, 27).view(3, 8)
    with torch.inference_mode():
        plain = model(input_ids=ids).last_hidden_state
    with packed_linears(model):
        assert "forward" in vars(model.encoder.layer[0].intermediate)
        packed = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)
    for layer in model.encoder.layer:  # another activation is no GELU
        layer.intermediate.intermediate_act_fn = nn.ReLU()
    with packed_linears(model):
        assert "forward" not in vars(model.encoder.layer[0].intermediate)
        other = model(input_ids=ids).last_hidden_state
    assert (other - plain).abs().max() > 1e-3


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_llamas_layers_open_while_they_multiply_and_give_the_same(act, bias):
    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(**size, vocab_size=50, num_hidden_layers=2, hidden_act=act, mlp_bias=bias)
    model = AutoModel.from_config(config).eval()
    for part in model.parameters():  # biases begin at 0, and weights so small that nothing bends
        torch.nn.init.normal_(part, std=0.5)
    ids = torch.arange(3, 27).view(3, 8)
    with torch.inference_mode():
        plain = model(input_ids=ids).last_hidden_state
    with packed_linears(model):
        assert "forward" in vars(model.layers[0].mlp)
        packed = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)
    assert "forward" not in vars(model.layers[0].mlp)


def test_a_layer_of_the_same_parts_that_does_something_else_is_not_taken_for_a_llamas():
    class Halved(LlamaMLP):
        def forward(self, x):
            return super().forward(x) / 2

    config = LlamaConfig(hidden_size=32, intermediate_size=12, vocab_size=50)
    x = torch.randn(3, 32)
    for kind, is_known in ((LlamaMLP, True), (Halved, False)):
        layer = kind(config)
        with torch.inference_mode():
            plain = layer(x)
        with packed_linears(layer):
            assert ("forward" in vars(layer)) == is_known
            torch.testing.assert_close(layer(x), plain, atol=1e-6, rtol=1e-5)


def test_layers_are_packed_only_for_many_tokens_and_where_memory_holds_the_copies(
    module, monkeypatch
):
    def is_packed(num_tokens):
        with packed_for(module, num_tokens):
            return "forward" in vars(module[0])

    assert [is_packed(n) for n in (MANY_TOKENS - 1, MANY_TOKENS)] == [False, True]
    size = 4 * (16 * 24 + 24 * 8)
    monkeypatch.setattr("pgra.lm.kernels.machine_memory", lambda: 4 * size - 4)
    assert not is_packed(MANY_TOKENS)
    monkeypatch.setattr("pgra.lm.kernels.machine_memory", lambda: 4 * size)
    assert is_packed(MANY_TOKENS)


def test_copies_are_made_once_when_all_readings_together_are_worth_it_and_kept(module):
    packer, x = Packer(module), torch.randn(5, 16)
    plain = module(x)
    with packer.packed(MANY_TOKENS - 1):
        assert "forward" not in vars(module[0])
    with packer.packed(1):
        forward = vars(module[0])["forward"]
    assert "forward" not in vars(module[0])
    with torch.no_grad():
        module[0].weight.zero_()  # the control: what is kept is no longer the weight
    with packer.packed(1):
        assert vars(module[0])["forward"] is forward
        torch.testing.assert_close(module(x), plain, atol=1e-6, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16), packer.packed(1):
        assert "forward" not in vars(module[0])
    assert (module(x) - plain).abs().max() > 1e-2


def test_what_memory_does_not_hold_is_never_packed(module, monkeypatch):
    monkeypatch.setattr("pgra.lm.kernels.machine_memory", lambda: 0)
    packer = Packer(module)
    for _ in range(2):
        with packer.packed(MANY_TOKENS):
            assert "forward" not in vars(module[0])
