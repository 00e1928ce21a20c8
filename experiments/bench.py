"""Measures this machine.

  python3 -m experiments.bench --suite=train --json=/tmp/train.json

train and decode compare with transformers on torch, if they are installed;
delta compares with a generic compressor, kernels with the same model without
the numeric contract, sandbox with nothing. Rounds of both sides alternate in
one process, and the figure is the median of the paired ratios. Close other
programs first.
"""

import importlib
import importlib.metadata
import json
import os
import pathlib
import platform

from absl import flags

from experiments import flags as binary
from experiments import machine

_SUITES = ('train', 'decode', 'delta', 'kernels', 'sandbox')
_WITH_PEER = ('train', 'decode')  # suites that compare with transformers
_PACKAGES = ('jax', 'jaxlib', 'torch', 'transformers')

_SUITE = flags.DEFINE_enum('suite', 'train', _SUITES, 'What to measure.')
_JSON = flags.DEFINE_string('json', None, 'File to write every round to.')
_PAIRS = flags.DEFINE_integer(
    'pairs', 5, 'Rounds of each side, after one to warm up.', lower_bound=1
)


def conditions() -> dict[str, str | float | None]:
  """What a figure depends on besides the code."""
  found = {
      d.metadata['Name'].lower() for d in importlib.metadata.distributions()
  }
  versions = {
      name: importlib.metadata.version(name)
      for name in _PACKAGES
      if name in found
  }
  return {
      'processor': platform.processor() or platform.machine(),
      'cores': os.cpu_count(),
      'load_before': os.getloadavg()[0],
      'malloc': os.environ.get('GLIBC_TUNABLES', ''),
      **versions,
  }


def write(path: str, suite: str, before: dict, results: list) -> None:
  """Writes every round, and the machine as it was before the first."""
  report = {
      'suite': suite,
      'machine': before,
      'results': [r.as_json() for r in results],
  }
  pathlib.Path(path).write_text(json.dumps(report, indent=2) + '\n')


def main() -> None:
  import jax

  machine.keep_memory()  # as every trainer does; the peer profits, too
  jax.config.update('jax_num_cpu_devices', 2)
  from experiments.bench_suites import mixtral

  before = conditions()
  if before['load_before'] > 0.5:
    # Torch's threads wait for each other actively: on a busy machine it loses
    # far more than we do, and the ratio flatters us.
    print(f'warning: load {before["load_before"]:.1f}; close other programs')
  suite = importlib.import_module(f'experiments.bench_suites.{_SUITE.value}')
  results = suite.run(pairs=_PAIRS.value)
  for result in results:
    print(result)
  if _SUITE.value in _WITH_PEER and not mixtral.installed():
    print("no peer to compare with: pip install -e '.[peers]'")
  if _JSON.value:
    write(_JSON.value, _SUITE.value, before, results)
    if hasattr(suite, 'plot'):
      suite.plot(pathlib.Path(_JSON.value).with_suffix('.png'), results)


if __name__ == '__main__':
  binary.run(main)
