"""Binaries as a user meets them: real processes, exit codes, signals."""

from importlib import util
import mmap
import os
import pathlib
import platform
import signal
import subprocess
import sys
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import config_text
from experiments import flags
from experiments import machine

_ROOT = pathlib.Path(__file__).parents[1]

_CONFIG = """
import dataclasses
from composer_jax import config

@dataclasses.dataclass(frozen=True)
class SoftClip:
  width: float = 0.3

def experiment():
  nothing = dict.fromkeys(('advantage', 'tasks', 'rl_optimizer'))
  return config.Experiment(
      'soft', SoftClip(), rewards=(), phases=(), **nothing
  )

def wrong():
  return 3
"""

# Counts the page faults of the second use of a large block, in a thread.
_FAULTS = """
import resource, threading
from experiments import machine

def use():
  b'x' * (64 << 20)

if KEEP:
  machine.keep_memory()
for _ in range(2):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  thread = threading.Thread(target=use)
  thread.start()
  thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_BINARY = '''
"""Does one thing.

And explains it.
"""
import sys
import time
from absl import flags as absl_flags
from composer_jax.runs import manifest
from experiments import flags

flags.define_experiment()
flags.define_workdir()
flags.define_dry_run()
flags.define_compilation_cache()
_MODE = absl_flags.DEFINE_string('mode', 'print', 'What to do.')

def main():
  cfg = flags.experiment()
  if absl_flags.FLAGS.dry_run:
    print('plan', cfg.loss.width, cfg.seed)
    return
  workdir = flags.workdir()
  (workdir / manifest.FILE).write_text('{"format": "composer_jax run"}')
  if _MODE.value == 'nan':
    raise FloatingPointError('step 3:\\nloss is nan')
  if _MODE.value == 'fault':
    raise KeyError('a fault of the program')
  if _MODE.value == 'loop':
    from experiments import machine
    with machine.Interrupt() as stop:
      print('ready', flush=True)
      while not stop():
        time.sleep(0.01)
      print('saved; continue with:', flags.command(), flush=True)
      if '--mode=loop' in sys.argv[-1]:
        time.sleep(30)
  if _MODE.value == 'import':
    import stubborn
  if _MODE.value == 'devices':
    from experiments import machine
    import jax
    devices = machine.setup_devices(cfg, absl_flags.FLAGS.compilation_cache)
    print(devices.train, devices.rollout, jax.device_count())
    print(jax.config.jax_compilation_cache_dir)

if __name__ == '__main__':
  flags.run(main)
'''


class BinaryTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    (self.dir / 'soft_clip.py').write_text(_CONFIG)
    (self.dir / 'program.py').write_text(_BINARY)
    self.config = f'--config={self.dir}/soft_clip.py'
    self.workdir = f'--workdir={self.dir}/run'

  def start(self, *args, **env):
    return subprocess.Popen(
        # A shell's background job, as these tests may be, ignores it.
        ['env', '--default-signal=INT']
        + [sys.executable, str(self.dir / 'program.py'), *args],
        cwd=self.dir,
        env=os.environ | {'PYTHONPATH': str(_ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

  def run_binary(self, *args, **env):
    with self.start(*args, **env) as process:
      out, err = process.communicate(timeout=600)
    return process.returncode, out, err

  def assert_one_line(self, result, pattern):
    code, out, err = result
    self.assertEqual((code, out), (2, ''))
    self.assertRegex(err, r'\Aprogram: error: [^\n]*\n\Z')
    self.assertRegex(err, pattern)

  def test_help(self):
    code, out, err = self.run_binary('--help')
    self.assertEqual((code, err), (0, ''))
    for text in ('Does one thing.', 'And explains it.', '--mode', '--config'):
      self.assertIn(text, out)
    for flag in ('set', 'seed', 'workdir', 'dry_run', 'compilation_cache'):
      self.assertRegex(out, rf'\n  --{flag}\n      \w')
    self.assertNotIn('flagfile', out)

  @parameterized.parameters('midtrain', 'quickstart', 'rl')
  def test_help_of_a_training_binary_has_the_flags_that_it_takes(self, name):
    out = subprocess.run(
        [sys.executable, '-m', f'experiments.{name}', '--help'],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    ).stdout
    for flag in ('config', 'set', 'seed', 'workdir', 'dry_run'):
      self.assertIn(f'\n  --{flag}\n', out)

  @parameterized.parameters(
      (['--worrkdir=x'], "'worrkdir'. Did you mean: workdir"),
      (['--seed=x', '--workdir=x'], '--seed=x: invalid'),
      (['--workdir=x', 'extra'], "'extra' is not a flag"),
      (['--workdir=s3://x/y'], 's3://x/y: must be a directory of this mach'),
      ([], '--workdir=None: this flag is required'),
      (['--workdir=x', '--config=none_such'], 'none_such: no such module'),
      (['--workdir=x', '--config=none.such'], 'none.such: no such module'),
      (['--workdir=x', '--config=none.py'], 'none.py: no such file'),
      (['--workdir=x', '--config=json'], 'no such module'),
      (['--workdir=x', '--config=os.path'], 'defines no function experiment'),
  )
  def test_wrong_flags(self, args, pattern):
    self.assert_one_line(self.run_binary(*args), pattern)

  @parameterized.parameters(
      ('--set=loss.widht=1', "did you mean 'width'"),
      ('--set=loss.width=wide', "want float, got 'wide'"),
      ('--mode=nan', 'step 3: loss is nan'),
      ('--workdir=/proc/none/run', '/proc/none/run: cannot be written'),
      ('--workdir=/dev/null', '/dev/null: cannot be written'),
      ('--set=mesh.data=100', r'mesh.data=100: only \d+ cpu devices'),
  )
  def test_wrong_values(self, flag, pattern):
    mode = [] if 'mode' in flag else ['--mode=devices']
    result = self.run_binary(self.config, self.workdir, *mode, flag)
    self.assert_one_line(result, pattern)

  def test_mesh_obeys_the_devices_of_the_process(self):
    result = self.run_binary(
        self.config, self.workdir, '--mode=devices', JAX_NUM_CPU_DEVICES='1'
    )
    self.assert_one_line(result, r'data=2: only 1 cpu devices')

  def test_devices_and_cache(self):
    cache = f'--compilation_cache={self.dir}/cache'
    code, out, err = self.run_binary(
        self.config, self.workdir, '--mode=devices', cache
    )
    self.assertEqual((code, err), (0, ''))
    self.assertIn('[CpuDevice(id=0), CpuDevice(id=1)] cpu:2 3', out)
    self.assertIn(f'{self.dir}/cache', out)

  def test_config_file_seed_and_override(self):
    code, out, err = self.run_binary(
        self.config,
        self.workdir,
        '--set=loss.width=0.2',
        '--set=seed=1',
        '--seed=7',
        '--dry_run',
    )
    self.assertEqual((code, out, err), (0, 'plan 0.2 7\n', ''))
    self.assertFalse((self.dir / 'run').exists())

  def test_dotted_config(self):
    args = ('--config=pack.soft_clip', self.workdir, '--dry_run')
    (self.dir / 'pack').mkdir()
    (self.dir / 'soft_clip.py').rename(self.dir / 'pack' / 'soft_clip.py')
    self.assertEqual(self.run_binary(*args)[1], 'plan 0.3 0\n')

  def test_fault_of_the_program_keeps_its_traceback(self):
    code, _, err = self.run_binary(self.config, self.workdir, '--mode=fault')
    self.assertEqual(code, 1)
    self.assertIn('Traceback', err)

  def test_traceback_on_request(self):
    code, _, err = self.run_binary(
        self.config, self.workdir, '--mode=nan', '--traceback'
    )
    self.assertEqual(code, 2)
    self.assertIn('Traceback', err)

  def test_import_error_inside_a_config_is_shown(self):
    (self.dir / 'soft_clip.py').write_text('import none_such_package')
    code, _, err = self.run_binary(self.config, self.workdir)
    self.assertEqual(code, 1)
    self.assertIn('none_such_package', err)

  def test_foreign_work_directory_is_refused(self):
    (self.dir / 'run').mkdir()
    (self.dir / 'run' / 'thesis.tex').write_text('x')
    result = self.run_binary(self.config, self.workdir)
    self.assert_one_line(result, "holds 'thesis.tex' but no run")
    self.assertEqual(os.listdir(self.dir / 'run'), ['thesis.tex'])

  def test_work_directory_is_locked_and_reopens(self):
    args = (self.config, self.workdir)
    with self.start(*args, '--mode=loop') as first:
      self.assertEqual(first.stdout.readline(), 'ready\n')
      self.assert_one_line(self.run_binary(*args), 'another process runs in')
      first.kill()
    self.assertEqual(self.run_binary(*args), (0, '', ''))

  @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
  def test_first_signal_finishes_and_says_how_to_continue(self, number):
    args = ('--mode=loop', self.config, self.workdir)
    with self.start(*args) as process:
      self.assertEqual(process.stdout.readline(), 'ready\n')
      process.send_signal(number)
      out, err = process.communicate(timeout=600)
    self.assertEqual(process.returncode, 0)
    self.assertIn('stopping after this step', err)
    self.assertIn(f'python3 {self.dir}/program.py {" ".join(args)}', out)

  def test_second_signal_aborts(self):
    # With --mode last the program hangs after it was asked to stop.
    with self.start(self.config, self.workdir, '--mode=loop') as process:
      self.assertEqual(process.stdout.readline(), 'ready\n')
      process.send_signal(signal.SIGINT)
      self.assertStartsWith(process.stdout.readline(), 'saved')
      start = time.monotonic()
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=600)
    self.assertEqual(process.returncode, flags.INTERRUPT_EXIT_CODE)
    self.assertLess(time.monotonic() - start, 600)
    self.assertEndsWith(err, 'program: aborted\n')
    self.assertNotIn('Traceback', err)

  def test_interrupt_of_an_import_that_swallows_it(self):
    (self.dir / 'stubborn.py').write_text(
        'import time\n'
        'try:\n'
        "  print('importing', flush=True)\n"
        '  time.sleep(3600)\n'
        'except BaseException:\n'
        '  pass\n'
    )
    args = (self.config, self.workdir, '--mode=import')
    with self.start(*args) as process:
      self.assertEqual(process.stdout.readline(), 'importing\n')
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=600)
    self.assertEqual(process.returncode, 130)
    self.assertEqual(err.strip(), 'program: aborted')


class InProcessTest(absltest.TestCase):

  def test_a_loaded_file_can_be_found_again_by_its_text(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'soft_clip_b.py'
    path.write_text(_CONFIG)
    cfg = flags.load(str(path))
    self.assertEqual(config_text.from_json(config_text.to_json(cfg)), cfg)
    self.assertEqual(flags.load(str(path)), cfg)

  def test_a_file_named_like_a_module_is_refused(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'json.py'
    path.write_text(_CONFIG)
    with self.assertRaisesRegex(ValueError, 'name of another module'):
      flags.load(str(path))

  def test_experiment_of_the_wrong_type(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'soft_clip_c.py'
    path.write_text('def experiment():\n  return 3\n')
    with self.assertRaisesRegex(ValueError, 'returned int, want'):
      flags.load(str(path))

  def test_interrupt_restores_the_handlers(self):
    self.assertIs(threading.current_thread(), threading.main_thread())
    before = signal.getsignal(signal.SIGINT)
    with machine.Interrupt() as stop:
      self.assertFalse(stop())
      signal.raise_signal(signal.SIGINT)
      self.assertTrue(stop())
      with self.assertRaises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    self.assertIs(signal.getsignal(signal.SIGINT), before)

  def test_cache_is_per_version_and_processor(self):
    self.assertRegex(machine.default_cache().name, r'^jax-[\d.]+-[0-9a-f]{12}$')

  def test_freed_memory_is_kept_for_the_next_step(self):
    if platform.libc_ver()[0] != 'glibc' or util.find_spec('jax_plugins'):
      self.skipTest('memory is only kept with glibc, where jax has only a CPU')
    huge = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
    if huge.exists() and '[always]' in huge.read_text():
      self.skipTest('pages are huge, so there are hardly any faults')
    faults = {}
    for kept in (False, True):
      script = _FAULTS.replace('KEEP', str(kept))
      ran = subprocess.run(
          [sys.executable, '-c', script],
          cwd=_ROOT,
          capture_output=True,
          text=True,
          check=True,
      )
      faults[kept] = int(ran.stdout)
    pages = (64 << 20) // mmap.PAGESIZE
    self.assertGreater(faults[False], 0.9 * pages)
    self.assertLess(faults[True], 0.1 * pages)


if __name__ == '__main__':
  absltest.main()
