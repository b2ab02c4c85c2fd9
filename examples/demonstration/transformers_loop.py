"""A causal language model of Hugging Face transformers in a hand-written loop: the model's own loss, divided by A."""

import torch
from sentences import GROUP, VOCAB, micro_batches
from transformers import GPT2Config, GPT2LMHeadModel


def build() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=160, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.loss_type = "ForCausalLM"
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
