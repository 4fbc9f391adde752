"""Models of transformers, as a user takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.gallery.parts import (
    Example,
)


def _tokens() -> Any:
    return torch.randint(0, 31, (2, 7))


def gpt2_with_default_cache(attention: Any = "sdpa") -> Any:
    """GPT2 appends keys and values to its cache by default, in recomputation once more; causal attention
    aligned to the first key never looks at what was appended."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 (not every machine has it)

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

    def loss(out: Any) -> Any:
        return functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return GPT2LMHeadModel(config), (tokens,), loss


def gpt2_eager_with_default_cache() -> Any:
    """The same with eager attention, whose mask does not fit twice the keys: recomputation raises."""
    return gpt2_with_default_cache("eager")


class Labelled(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        return self.inner(**batch)


def t5_with_labels() -> Any:
    """Encoder and decoder with dropout and a position bias that the first block computes and hands on; the
    loss is the model's own."""
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415 (not every machine has it)

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


def bert_classifier() -> Example:
    """A dict of inputs, dropout, hidden states in the output, and the loss by its key."""
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 (not every machine has it)

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
