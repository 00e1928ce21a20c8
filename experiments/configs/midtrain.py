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

from composer_jax import config
from composer_jax.learner import optimizer
from experiments.configs import tiny


def experiment() -> config.Experiment:
  return dataclasses.replace(
      tiny.experiment(),
      name='midtrain',
      # A bias balances the experts instead of a loss, and a second head that
      # no policy runs predicts one token more (DeepSeek-V3).
      model=config.ModelConfig(router='sigmoid', mtp_layers=1),
      shards=(
          config.ShardsConfig('code_shards', 'tokens/code'),
          config.ShardsConfig('chats', 'tokens/chats'),
      ),
      phases=(
          config.PhaseConfig(
              name='short',
              optimizer=optimizer.Muon(
                  learning_rate=3e-3,
                  weight_decay=0.01,
                  schedule=optimizer.Wsd(100, 40, warmup_steps=10),
              ),
              steps=150,
              rows_per_step=16,
              tokens_per_row=256,
              mix=(('code_shards', 1),),
              balancing=config.Balancing(z=1e-3, bias_speed=1e-2),
              mtp=config.Mtp(0.3),
              eval_every_steps=50,
          ),
          config.PhaseConfig(
              name='long',
              optimizer=optimizer.AdamW(
                  learning_rate=1e-3,
                  weight_decay=0.01,
                  schedule=optimizer.Constant(warmup_steps=5),
              ),
              steps=30,
              rows_per_step=4,
              tokens_per_row=1024,
              mix=(('code_shards', 3), ('chats', 1)),
              balancing=config.Balancing(z=1e-3, bias_speed=1e-2),
              mtp=config.Mtp(0.1),
          ),
          config.PhaseConfig(
              name='sft',
              optimizer=optimizer.AdamW(
                  learning_rate=5e-4,
                  schedule=optimizer.Cosine(30, final_fraction=0.0),
              ),
              steps=30,
              rows_per_step=8,
              tokens_per_row=512,
              mix=(('chats', 1),),
              balancing=config.Balancing(),
              mtp=config.Mtp(0.1, distill=True),
          ),
      ),
  )
