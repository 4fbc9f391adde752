"""Models of transformers, as a user takes them."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import torch


def _tokens():
    return torch.randint(0, 31, (2, 7))


def gpt2_with_default_cache(attention="sdpa"):
    """use_cache stays at its default, True: each block appends keys and values to a cache, recomputation too.

    Right all the same: with causal attention that starts at the first key, queries never see what was appended.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3,
        n_head=2,
        n_embd=16,
        vocab_size=31,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    tokens = _tokens()

    def loss(out):
        return torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return GPT2LMHeadModel(config), (tokens,), loss


def gpt2_eager_with_default_cache():
    """With eager attention the mask no longer fits the keys."""
    return gpt2_with_default_cache("eager")


class Labelled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner(**batch)


def t5_with_labels():
    """Right: an encoder with decoder, dropout, a position bias that the first block hands on, the model's own loss."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=3,
        num_heads=2,
        vocab_size=31,
        use_cache=False,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    batch = {
        "input_ids": _tokens(),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "labels": _tokens(),
    }
    batch["attention_mask"][1, 4:] = 0
    return Labelled(T5ForConditionalGeneration(config)), (batch,), lambda out: out.loss


def bert_classifier():
    """Right: dict inputs, tied embeddings, dropout, outputs with hidden states."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=31,
        max_position_embeddings=16,
        output_hidden_states=True,
    )
    batch = {"input_ids": _tokens(), "labels": torch.tensor([0, 1])}
    return Labelled(BertForSequenceClassification(config)), (batch,), lambda out: out["loss"]
