"""Makes a published model the first version of a weight store.

  python3 -m experiments.import_model --folder=DIR --store=URL

The folder holds config.json, safetensors, tokenizer.json and a chat template, as
on the Hugging Face hub: Llama, Mixtral, Qwen2 (and 1.5), Qwen2-MoE, Qwen3,
Qwen3-MoE, DeepSeek-V3, Kimi-K2. What `serve`, `rollout_host` and `chat` need is
put beside the weights.
"""

import pathlib
import uuid

from absl import flags as absl_flags
from experiments import flags

absl_flags.DEFINE_string('folder', None, 'Directory of the model.')
absl_flags.DEFINE_string('store', None, 'URL or directory of a new store.')
absl_flags.DEFINE_string('name', None, "For clients. Default: the folder's.")
for _name in ('folder', 'store'):
  absl_flags.register_validator(_name, bool, message='this flag is required')


def main() -> int:
  from composer_jax.model import params
  from composer_jax.runs import conversion
  from composer_jax.runs import progress

  values = absl_flags.FLAGS
  folder = pathlib.Path(values.folder).resolve()
  url = flags.store(new=True)
  stored = conversion.model_of(folder, values.name or folder.name)
  counts = params.count(stored.model)
  total, active = map(progress.figure, counts)
  print(f'{stored.name}: {total} parameters, {active} active per token')
  done = 0
  with progress.Progress(counts[0], 'parameter', label='read') as bar:

    def read(count):
      nonlocal done
      done += count
      bar.update(done)

    version = conversion.publish_folder(
        folder, url, stored, uuid.uuid4().hex, read
    )
  print(f'version {version.step}, {version.digest}, in {url}')
  return 0


if __name__ == '__main__':
  flags.run(main)
