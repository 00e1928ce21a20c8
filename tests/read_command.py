"""Reads command lines as their binaries would, each in a process of its own.

  python -m tests.read_command 'MODULE ARGUMENT...' ...

Prints the plan of a run, or nothing for a binary that runs nothing. The
processes are forks of one that has the slow imports behind it.
"""

import os
import runpy
import shlex
import sys

from absl import flags as absl_flags
from composer_jax.runs import base_model
from composer_jax.runs import plan
from experiments import flags


def _parse(main):
  del main  # It would do what the command says.
  absl_flags.DEFINE_bool('traceback', False, '')
  rest = absl_flags.FLAGS(sys.argv)[1:]
  if rest:
    raise ValueError(f'{rest}: not a flag')
  base_model.adopt = lambda cfg: cfg  # a folder that another command makes
  if 'config' in absl_flags.FLAGS:
    print(plan.text(flags.experiment()))


def _read(command):
  """Returns the exit status of a fork that reads the command."""
  sys.stdout.flush()
  child = os.fork()
  if child:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  sys.argv = shlex.split(command)
  runpy.run_module(sys.argv[0], run_name='__main__')
  sys.exit()


if __name__ == '__main__':
  flags.run = _parse
  for line in sys.argv[1:]:
    if _read(line):
      sys.exit(f'refused: {line}')
