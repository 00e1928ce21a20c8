"""Reads one command line as its binary would, in a process of its own.

  python -m tests.read_command MODULE ARGUMENT...

Prints the plan of a run, or nothing for a binary that runs nothing.
"""

import runpy
import sys

from absl import flags as absl_flags
from composer_jax.runs import plan
from experiments import flags


def _parse(main):
  del main  # It would do what the command says.
  absl_flags.DEFINE_bool('traceback', False, '')
  rest = absl_flags.FLAGS(sys.argv)[1:]
  if rest:
    raise ValueError(f'{rest}: not a flag')
  if 'config' in absl_flags.FLAGS:
    print(plan.text(flags.experiment()))


if __name__ == '__main__':
  flags.run = _parse
  sys.argv = sys.argv[1:]
  runpy.run_module(sys.argv[0], run_name='__main__')
