"""Three phases on token shards: short context, long context, chats.

  python3 -m experiments.tokenize --input=CODE_DIR --output=tokens/code
      --tokenizer=RUN/tokenizer.json
  python3 -m experiments.tokenize --input=chats.jsonl --output=tokens/chats
      --tokenizer=RUN/tokenizer.json --field=messages
  python3 -m experiments.midtrain --config=midtrain --workdir=DIR

Sized for a laptop; the tokenizer is that of `tiny`, so RUN may be one of its
runs. --set=shards.chats.path=DIR reads from elsewhere.
"""

import dataclasses

import composer_jax as cj
from experiments.configs import tiny


def experiment() -> cj.Experiment:
  return dataclasses.replace(
      tiny.experiment(),
      name='midtrain',
      # A bias balances the experts instead of a loss, and a second head that
      # no policy runs predicts one token more (DeepSeek-V3).
      model=cj.ModelConfig(router='sigmoid', mtp_layers=1),
      shards=(
          cj.ShardsConfig('code_shards', 'tokens/code'),
          cj.ShardsConfig('chats', 'tokens/chats'),
      ),
      phases=(
          cj.PhaseConfig(
              name='short',
              optimizer=cj.Muon(
                  learning_rate=3e-3,
                  weight_decay=0.01,
                  schedule=cj.Wsd(100, 40, warmup_steps=10),
              ),
              steps=150,
              rows_per_step=16,
              tokens_per_row=256,
              mix=(('code_shards', 1),),
              balancing=cj.Balancing(z=1e-3, bias_speed=1e-2),
              mtp=cj.Mtp(0.3),
              eval_every_steps=50,
          ),
          cj.PhaseConfig(
              name='long',
              optimizer=cj.AdamW(
                  learning_rate=1e-3,
                  weight_decay=0.01,
                  schedule=cj.Constant(warmup_steps=5),
              ),
              steps=30,
              rows_per_step=4,
              tokens_per_row=1024,
              mix=(('code_shards', 3), ('chats', 1)),
              balancing=cj.Balancing(z=1e-3, bias_speed=1e-2),
              mtp=cj.Mtp(0.1),
          ),
          cj.PhaseConfig(
              name='sft',
              optimizer=cj.AdamW(
                  learning_rate=5e-4,
                  schedule=cj.Cosine(30, final_fraction=0.0),
              ),
              steps=30,
              rows_per_step=8,
              tokens_per_row=512,
              mix=(('chats', 1),),
              balancing=cj.Balancing(),
              mtp=cj.Mtp(0.1, distill=True),
          ),
      ),
  )
