"""Documents to token shards, which mid-training reads where they lie.

  python3 -m experiments.tokenize --input=PATH [--input=PATH ...]
      --tokenizer=tokenizer.json --output=DIR

PATH is a file of JSON lines, a Parquet file, or a folder of text files; the
tokenizer is a file or the folder of a model. --field=messages reads chats, of
which replies alone are trained. The same command continues where it was stopped
or killed. Name DIR in `shards` of a config (see experiments/configs/midtrain.py).
"""

import pathlib

from absl import flags as absl_flags
from experiments import flags

absl_flags.DEFINE_multi_string('input', None, 'File or folder to read.')
absl_flags.DEFINE_string('tokenizer', None, 'tokenizer.json, or its folder.')
absl_flags.DEFINE_string('output', None, 'Directory of the shards.')
for _name in ('input', 'tokenizer', 'output'):
  absl_flags.register_validator(_name, bool, message='this flag is required')
flags.local('output')
absl_flags.DEFINE_string(
    'field', 'text', "Of a record: its text, or 'messages' for chats."
)
absl_flags.DEFINE_string('suffix', '.py', 'Of files in a folder.')
absl_flags.DEFINE_string(
    'start',
    None,
    "Token before a text. Default: <|bos|>, or the model's bos or eos token.",
)
absl_flags.DEFINE_enum(
    'dtype',
    None,
    ['uint16', 'uint32'],
    'Of ids on disk. Default: the smaller one that suffices.',
)
absl_flags.DEFINE_float(
    'heldout_fraction', 0.02, 'Of documents, chosen by hash of their name.'
)
absl_flags.DEFINE_integer(
    'shard_tokens', 1 << 26, 'After which a shard ends; a kill costs one.'
)


def main() -> int:
  from composer_jax.data import inputs
  from composer_jax.data import shards
  from composer_jax.data import tokenization
  from composer_jax.runs import progress

  values = absl_flags.FLAGS
  files = inputs.find(values.input, values.suffix)
  encoder = tokenization.open_encoder(
      values.tokenizer, values.field, values.start
  )
  header = tokenization.header(
      encoder,
      files,
      values.dtype,
      values.heldout_fraction,
      values.shard_tokens,
  )
  output = pathlib.Path(values.output)
  writer = shards.ShardWriter(output, header, encoder.source)
  if not writer.index['complete']:
    total = sum(file.size for file in files) // 10**6
    with progress.Progress(total, 'MB', label='tokenize') as bar:
      moved = lambda done, **figures: bar.update(done // 10**6, **figures)
      tokenization.run(files, encoder, writer, moved)
  for side in (shards.TRAIN, shards.HELDOUT):
    parts = [shard[side] for shard in writer.index['shards']]
    documents, tokens, size = (
        sum(part[k] for part in parts)
        for k in ('documents', 'tokens', 'utf8_bytes')
    )
    print(f'{side}: {documents:,} documents, {tokens:,} tokens, {size:,} bytes')
  return 0


if __name__ == '__main__':
  flags.run(main)
