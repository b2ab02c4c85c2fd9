"""A causal language model of Hugging Face transformers in a hand-written loop: the model's own loss, divided by A."""

import torch
from sentences import GROUP, VOCAB, micro_batches
from transformers import GPT2Config, GPT2LMHeadModel


def build() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=160, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(micro_batches(), 1):
        loss = model(**batch).loss / GROUP
        loss.backward()
        if number % GROUP == 0:
            optimizer.step()
            optimizer.zero_grad()
    print("trained")


if __name__ == "__main__":
    main()
