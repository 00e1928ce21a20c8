"""Writes a version of a weight store as a folder that other engines read.

  python3 -m experiments.export_model --store=URL --folder=DIR [--version=N]

The folder is as on the Hugging Face hub: config.json, safetensors in bfloat16,
tokenizer and chat template. A model that no published family can
express is refused.
"""

import pathlib
import sys

from absl import flags as absl_flags
from experiments import flags

absl_flags.DEFINE_string('store', None, 'URL or directory of a weight store.')
absl_flags.DEFINE_string('folder', None, 'Directory to make.')
absl_flags.DEFINE_integer('version', None, 'Default: the newest.')
for _name in ('folder', 'store'):
  absl_flags.register_validator(_name, bool, message='this flag is required')
flags.local('folder')


def main() -> int:
  from composer_jax.runs import conversion
  from composer_jax.weights import follow
  from composer_jax.weights import records

  values = absl_flags.FLAGS
  folder = pathlib.Path(values.folder).absolute()
  try:
    version = conversion.export_folder(flags.store(), values.version, folder)
  except (records.StoreError, follow.FollowError) as e:
    print(f'export_model: damaged store: {e}', file=sys.stderr)
    return 1
  print(f'version {version.step}, {version.digest}, in {folder}')
  return 0


if __name__ == '__main__':
  flags.run(main)
