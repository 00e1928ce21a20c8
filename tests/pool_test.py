"""The attack list, on real sandboxes, at every level of isolation."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from tests import sandbox_attacks

from composer_jax.sandbox import box
from composer_jax.sandbox import child as child_lib
from composer_jax.sandbox import pool as pool_lib

_ROOT = pathlib.Path(__file__).parents[1]
_BUBBLEWRAP = box.Level('bubblewrap', 'forced by the test')
_LANDLOCK = box.Level('landlock', 'forced by the test')
# CI installs bubblewrap; where it is missing, the fallback is what runs.
_HAS_BWRAP = shutil.which('bwrap') is not None
_LEVELS = (_LANDLOCK,) + (_BUBBLEWRAP,) * _HAS_BWRAP


def _play(scenario, level=None, size=1, caps=None):
  """Runs `await scenario(session)` in a session of a new pool."""

  async def main():
    async with pool_lib.Pool(size, caps, level) as pool:
      async with pool.session() as session:
        return await scenario(session)

  return asyncio.run(main())


async def _fine(session):
  """The sandbox still does what it should."""
  result = await session.exec('echo $((6*7))', wall_seconds=30)
  return result.ok and result.output == b'42\n'


def _descendants(pid):
  found = []
  for task in pathlib.Path(f'/proc/{pid}/task').iterdir():
    with contextlib.suppress(OSError):
      for child in (task / 'children').read_text().split():
        found += [int(child), *_descendants(int(child))]
  return found


class AttackTest(parameterized.TestCase):

  @parameterized.product(level=_LEVELS)
  def test_from_this_user(self, level):
    for name, (got, want) in asyncio.run(
        sandbox_attacks.play(level.name)
    ).items():
      self.assertEqual(got, want, name)

  @unittest.skipUnless(os.geteuid() == 0, 'only root can become another user')
  def test_from_an_ordinary_user(self):
    with tempfile.TemporaryDirectory() as home:
      os.chmod(home, 0o755)
      package = pathlib.Path(home, 'composer_jax', 'sandbox')
      package.mkdir(parents=True)
      for module in ('box', 'child', 'disk', 'etc', 'isolation', 'pool'):
        shutil.copy(_ROOT / f'composer_jax/sandbox/{module}.py', package)
      shutil.copy(sandbox_attacks.__file__, home)
      out = subprocess.run(
          [
              *(box._interpreter(), 'sandbox_attacks.py'),
              *(level.name for level in _LEVELS),
          ],
          user=54321,
          group=54321,
          extra_groups=[],
          cwd=home,
          # Only the copy may be found.
          env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
          capture_output=True,
          text=True,
      )
    self.assertEqual(out.stdout, f'played {box.describe().name}\n', out.stderr)

  def test_filling_every_directory_stops_at_the_cap(self):
    async def fill(session):
      result = await session.python(sandbox_attacks.FILL)
      return result.output.decode(), await session.put({'a': 'b'})

    text, put = _play(fill, caps=box.Caps(disk_bytes=4 << 20))
    written = dict(line.split() for line in text.splitlines())
    for base in ('/', '/dev', '/proc', '/run'):
      self.assertEqual(written[base], '0', base)
    for base in ('/dev/shm', '/tmp', '/box'):
      self.assertLessEqual(int(written[base]), 4, base)
    self.assertFalse(put.ok)  # the policy filled it: an answer, no exception
    self.assertEqual(put.status, 'exited')

  def test_many_processes_cannot_add_up_to_the_machines_memory(self):
    source = """
import os, time
for _ in range(8):
  if os.fork() == 0:
    hold = bytearray(b'x') * (40 << 20)
    time.sleep(30)
while True:
  print('busy', flush=True)  # does not distract the watch
"""

    async def allocate(session):
      result = await session.python(source, wall_seconds=20)
      return result.status, await _fine(session)

    caps = box.Caps(memory_bytes=128 << 20)
    self.assertEqual(_play(allocate, caps=caps), ('memory', True))

  @parameterized.product(how=tuple(sandbox_attacks.HIDERS))
  @unittest.skipUnless(_HAS_BWRAP, 'Landlock has no cap on all the memory')
  def test_memory_that_is_not_resident_counts(self, how):
    source = sandbox_attacks.HIDERS[how]
    caps = box.Caps(memory_bytes=64 << 20, open_files=512)
    result = _play(
        lambda s: s.python(source, cpu_seconds=60, wall_seconds=60),
        _BUBBLEWRAP,
        caps=caps,
    )
    self.assertEqual((result.status, result.output), ('memory', b''))

  @parameterized.product(level=_LEVELS)
  def test_programs_that_lock_and_map_their_own_files_go_on(self, level):
    source = """
import fcntl, mmap, os, sqlite3, threading
for mode in ('delete', 'wal'):
  with sqlite3.connect(f'{mode}.db') as db:
    db.execute(f'pragma journal_mode={mode}')
    db.execute('create table t (x)')
    db.execute('insert into t values (7)')
  print(sqlite3.connect(f'{mode}.db').execute('select x from t').fetchall())
with open('lock', 'w') as f:
  fcntl.flock(f, fcntl.LOCK_EX)
  fcntl.lockf(f, fcntl.LOCK_EX)
held = mmap.mmap(-1, 200 << 20)
ts = [threading.Thread(target=lambda: bytes(1 << 20)) for _ in range(20)]
for t in ts: t.start()
for t in ts: t.join()
os.chmod('lock', 0o755)
print(oct(os.stat('lock').st_mode & 0o777))
"""
    out = _play(lambda s: s.python(source), level)
    self.assertEqual(out.output, b'[(7,)]\n[(7,)]\n0o755\n')

  @parameterized.product(level=_LEVELS)
  def test_a_session_knows_its_user(self, level):
    out = _play(
        lambda s: s.python('import getpass; print(getpass.getuser())'), level
    )
    self.assertEqual(out.output, b'sandbox\n')
    out = _play(
        lambda s: s.exec("echo a b | awk '{print $2}'; which sh; date +%Z"),
        level,
    )
    self.assertEqual(out.output, b'b\n/usr/bin/sh\nUTC\n')

  @unittest.skipUnless(_HAS_BWRAP, 'Landlock shows files, it makes none')
  def test_etc_is_small_and_the_same_on_every_machine(self):
    source = """
import grp, os, pathlib, pwd, socket, threading, time
print(pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name)
print(os.path.expanduser('~'), pathlib.Path.home(), time.tzname)
server = socket.create_server(('localhost', 0))
print(socket.create_connection(('localhost', server.getsockname()[1])) != 0)
print(socket.gethostbyname(socket.gethostname()))
print(sorted(os.listdir('/etc')))
try: open('/etc/passwd', 'a'); print('WRITTEN')
except OSError: pass
"""

    async def ask(session):
      shell = await session.exec('whoami; id -un; id -gn; hostname')
      return shell.output + (await session.python(source)).output

    names = [*('alternatives',) * os.path.isdir('/etc/alternatives')]
    names += ['group', 'hosts', 'localtime', 'nsswitch.conf', 'passwd']
    want = f"""sandbox
sandbox
sandbox
sandbox
sandbox sandbox
/box /box ('UTC', 'UTC')
True
127.0.0.1
{names}
"""
    self.assertEqual(_play(ask, _BUBBLEWRAP).decode(), want)

  def test_memory_of_an_earlier_request_is_not_found(self):
    # Even with its own memory opened up, a child finds no earlier request.
    scan = """
import ctypes
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
import re
needle = re.compile(b'SECRE[T]_0123456789')  # does not contain itself
found = 0
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as mem:
  for line in maps.readlines():
    span, rights = line.split()[:2]
    if rights.startswith('rw'):
      low, high = (int(x, 16) for x in span.split('-'))
      try:
        mem.seek(low)
        found += len(needle.findall(mem.read(high - low)))
      except OSError: pass
print('found', found)
"""
    own = "x = 'SECRET_0123456789'" + scan

    async def peek(session):
      source = 'def f(x): return x + "SECRET_0123456789"'
      call = await session.call(
          source, 'f', ['["in"]'], cpu_seconds=1, wall_seconds=9
      )
      scanned = await session.python(scan)
      control = await session.python(own)
      return call.output, scanned.output, control.output

    output, scanned, control = _play(peek)
    self.assertIn(b'SECRET_0123456789', output)
    self.assertEqual(scanned, b'found 0\n')
    self.assertNotIn(b'found 0\n', control)  # the scanner does see memory

  @parameterized.product(level=_LEVELS)
  def test_a_child_starts_with_the_signals_of_any_program(self, level):
    source = """
import signal
mine = signal.pthread_sigmask(signal.SIG_BLOCK, [])
odd = {s for s in signal.valid_signals()
       if signal.getsignal(s) is not signal.SIG_DFL}
odd -= {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}
print(mine, odd, signal.getsignal(signal.SIGINT).__name__)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
      out = _play(lambda s: s.python(source), level)
    finally:
      signal.signal(signal.SIGHUP, before)
    self.assertEqual(out.output, b'set() set() default_int_handler\n')


class SessionTest(parameterized.TestCase):

  def test_dead_runner_is_an_infrastructure_error(self):

    async def die(session):
      await session.exec('true')
      session._box._process.kill()
      with self.assertRaises(pool_lib.SandboxError):
        await session.exec('true')
        await session.exec('true')
      with self.assertRaises(pool_lib.SandboxError):
        await session.exec('true')

    _play(die)

  def test_one_that_died_while_idle_is_not_handed_on(self):

    async def main():
      async with pool_lib.Pool(1) as pool:
        pool._idle[0]._process.kill()
        pool._idle[0]._process.wait()
        async with pool.session() as session:
          return await _fine(session)

    self.assertTrue(asyncio.run(main()))

  def test_cancelled_command_costs_the_sandbox_not_the_pool(self):

    async def main():
      async with pool_lib.Pool(1) as pool:
        async with pool.session() as session:
          with self.assertRaises(TimeoutError):
            await asyncio.wait_for(session.exec('sleep 60'), 0.3)
        async with pool.session() as session:
          return await _fine(session)

    self.assertTrue(asyncio.run(main()))

  @parameterized.product(level=_LEVELS)
  def test_pool_leaves_nothing_behind(self, level):
    before = set(_descendants(os.getpid()))
    # A place of its own: others on the machine have sandboxes, too.
    place = self.create_tempdir().full_path
    self.enter_context(mock.patch.object(tempfile, 'tempdir', place))
    files = len(os.listdir('/proc/self/fd'))

    async def main():
      async with pool_lib.Pool(2, level=level) as pool:

        async def one(k):
          async with pool.session() as session:
            out = await session.exec(f'sleep 100 & echo {k} | tee file')
            if k % 20 == 0:
              session._box._process.kill()  # and the pool starts another one
            return int(out.output)

        return await asyncio.gather(*(one(k) for k in range(200)))

    self.assertEqual(asyncio.run(main()), list(range(200)))
    self.assertEqual(set(_descendants(os.getpid())) - before, set())
    self.assertEmpty(os.listdir(place))
    self.assertNotIn(place, pathlib.Path('/proc/self/mounts').read_text())
    self.assertEqual(len(os.listdir('/proc/self/fd')), files)

  @parameterized.product(level=_LEVELS)
  def test_snapshot_forks_a_session(self, level):
    source = """
import os
open('text', 'wb').write(bytes(range(256)))
os.makedirs('deep/er')
open('deep/er/script', 'w').write('echo hi')
os.chmod('deep/er/script', 0o755)
os.symlink('/etc/passwd', 'link')
os.link('text', 'deep/hard')
os.mkfifo('pipe')
"""

    async def main():
      async with pool_lib.Pool(2, level=level) as pool:
        async with pool.session() as first, pool.session() as second:
          await first.python(source)
          taken = await first.snapshot()
          await first.put({'text': 'changed'})
          restored = await second.restore(taken)
          files = await second.get(['text', 'deep/hard', 'link', 'pipe'])
          ran = await second.exec('deep/er/script; readlink link; ls')
          # The policy's doing, so an answer: more than fits, or not readable.
          big = await second.snapshot(limit_bytes=1000)
          await first.exec('mkdir closed && chmod 0 closed')
          return restored, files, ran, big, await first.snapshot()

    restored, files, ran, big, closed = asyncio.run(main())
    self.assertTrue(restored.ok, restored.output)
    self.assertEqual(
        files, dict.fromkeys(['text', 'deep/hard'], bytes(range(256)))
    )
    self.assertEqual(ran.output, b'hi\n/etc/passwd\ndeep\nlink\ntext\n')
    self.assertEqual((big, closed), (None, None))

  def test_unused_session_takes_no_sandbox(self):

    async def main():
      async with pool_lib.Pool(1) as pool:
        async with contextlib.AsyncExitStack() as stack:
          for _ in range(50):
            await stack.enter_async_context(pool.session())
          session = await stack.enter_async_context(pool.session())
          return await _fine(session)

    self.assertTrue(asyncio.run(main()))

  def test_refusal_is_one_clear_line(self):
    level = box.Level('none', 'bubblewrap: missing')

    async def main():
      async with pool_lib.Pool(1, level=level):
        pass

    with self.assertRaisesRegex(
        pool_lib.SandboxError, '^no isolation .*missing$'
    ):
      asyncio.run(main())

  def test_describe_names_a_level_and_a_reason(self):
    level = pool_lib.describe()
    self.assertIn(level.name, ('bubblewrap', 'landlock'))
    self.assertNotEmpty(level.reason)


class RunnerTest(parameterized.TestCase):

  @parameterized.parameters(
      (1, True), (1, 1.0), ([1], (1,)), ('1', 1), (None, False), ({'a': 1}, [])
  )
  def test_canonical_tells_types_apart(self, a, b):
    self.assertNotEqual(child_lib.canonical(a), child_lib.canonical(b))

  def test_canonical_ignores_the_order_of_keys(self):
    self.assertEqual(
        child_lib.canonical({'b': [1, 'é'], 'a': 2.5}),
        "{'a':2.5,'b':[1,'\\xe9']}",
    )
    self.assertEqual(
        child_lib.canonical({'a': 1, 'b': 2}),
        child_lib.canonical({'b': 2, 'a': 1}),
    )

  def test_canonical_refuses_subclasses_and_objects(self):
    lie = type('Lie', (int,), {'__eq__': lambda a, b: True})
    endless = []
    endless.append(endless)
    for value in (lie(3), object(), {1: 2}, {1}, [lie(0)], endless, b'x'):
      with self.assertRaises(TypeError):
        child_lib.canonical(value)

  def test_the_runner_needs_only_the_standard_library(self):
    out = subprocess.run(
        [
            sys.executable,
            '-I',
            '-S',
            '-c',
            box._BOOTSTRAP,
            json.dumps(
                [{'composer_jax.sandbox.child': 'def main(): print("up")'}, {}]
            ),
        ],
        capture_output=True,
        text=True,
    )
    self.assertEqual(out.stdout, 'up\n', out.stderr)


if __name__ == '__main__':
  absltest.main()
