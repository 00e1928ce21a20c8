"""The attack list, on real sandboxes, at every level of isolation."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax.agents import box
from composer_jax.agents import runner
from composer_jax.agents import sandbox

_ROOT = pathlib.Path(__file__).parents[1]
_BUBBLEWRAP = box.Level('bubblewrap', 'forced by the test')
_LANDLOCK = box.Level('landlock', 'forced by the test')
# CI installs bubblewrap; where it is missing, the fallback is what runs.
_HAS_BWRAP = shutil.which('bwrap') is not None
_LEVELS = (_LANDLOCK,) + (_BUBBLEWRAP,) * _HAS_BWRAP

# Each prints SAFE, or what it achieved. {pid}: a process of the host.
# {port}: a listening port. {file}: a readable file of the host.
_ATTACKS = {
    'connect_to_loopback': """
import socket
socket.create_connection(('127.0.0.1', {port}), timeout=2)
print('CONNECTED')""",
    'read_grader': "print('READ', open('{file}').read())",
    'read_passwd': "print('READ', open('/etc/passwd').read())",
    'write_usr': "open('/usr/attack', 'w').write('x'); print('WROTE')",
    'write_root': "open('/attack', 'w').write('x'); print('WROTE')",
    'remount': """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b'none', b'/usr', None, 32 | 4096, None) == 0:
  open('/usr/attack', 'w'); print('REMOUNTED')
if libc.mount(b'none', b'/box', b'tmpfs', 0, None) == 0: print('MOUNTED')""",
    'signal_the_host': """
import os
os.kill({pid}, 9); print('KILLED')""",
    'user_namespace': """
import ctypes
libc = ctypes.CDLL(None)
if libc.unshare(0x10000000) == 0: print('UNSHARED')
if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) > 0: print('CLONED')""",
    'kill_the_runner': """
import os, signal
for target in (os.getppid(), -os.getpgid(os.getppid())):
  for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try: os.kill(target, s)
    except OSError: pass""",
    'starve_the_runner': """
import os, resource
for name in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
  try: resource.prlimit(os.getppid(), name, (0, 0)); print('LIMITED', name)
  except OSError: pass
for call in (lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
             lambda: os.sched_setaffinity(os.getppid(), [0])):
  try: call(); print('SLOWED')
  except OSError: pass""",
    'read_the_runner': """
import ctypes, os
for name in ('mem', 'environ', 'fd/0', 'maps'):
  try: open(f'/proc/{{os.getppid()}}/{{name}}', 'rb').read(1); print(name)
  except OSError: pass
if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('TRACED')""",
    'forge_a_reply': """
import os
for fd in range(256):
  if fd not in (1, 2):
    try: os.write(fd, bytes(64))
    except OSError: pass""",
    'share_memory_with_the_next': """
import ctypes
if ctypes.CDLL(None).shmget(1234, 4096, 0o1666) >= 0: print('SHARED')
if ctypes.CDLL(None).msgget(1234, 0o1666) >= 0: print('QUEUED')""",
    'tracing_and_rings': """
import ctypes
libc = ctypes.CDLL(None)
for name, number in (('io_uring', 425), ('bpf', 321), ('userfaultfd', 323),
                     ('keyctl', 250), ('perf', 298)):
  if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: print(name)""",
}


def _play(scenario, level=None, size=1, caps=None):
  """Runs `await scenario(session)` in a session of a new pool."""

  async def main():
    async with sandbox.Pool(size, caps, level) as pool:
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
  def test_attacks(self, level):
    listener = socket.create_server(('127.0.0.1', 0))
    victim = subprocess.Popen(['sleep', '60'])
    secret = tempfile.NamedTemporaryFile('w', suffix='.py')
    self.addCleanup(listener.close)
    self.addCleanup(secret.close)
    self.addCleanup(victim.wait)
    self.addCleanup(victim.kill)
    secret.write('expected = 42')
    secret.flush()
    os.chmod(secret.name, 0o644)
    facts = {
        'port': listener.getsockname()[1],
        'pid': victim.pid,
        'file': secret.name,
    }

    async def attack(session):
      out = {}
      for name, source in _ATTACKS.items():
        body = f'try:\n  exec({source.format(**facts)!r})\nexcept OSError: pass'
        result = await session.python(body + "\nprint('SAFE')")
        out[name] = (result.status, result.output.decode(), victim.poll())
      return out, await _fine(session)

    out, fine = _play(attack, level)
    # What the forger wrote went into its own output: nowhere else to go.
    forged = out.pop('forge_a_reply')[1].replace('\0', '')
    self.assertEqual(forged, 'SAFE\n')
    for name, seen in out.items():
      self.assertEqual(seen, ('exited', 'SAFE\n', None), name)
    self.assertTrue(fine)

  def test_filling_every_directory_stops_at_the_cap(self):
    source = """
import os
for base in ('/', '/dev', '/dev/shm', '/tmp', '/box', '/proc', '/run'):
  written = 0
  try:
    for k in range(8):
      with open(os.path.join(base, f'fill{k}'), 'wb', 0) as f:
        for _ in range(8): written += f.write(bytes(1 << 20))
  except OSError: pass
  print(base, written >> 20)
"""

    async def fill(session):
      result = await session.python(source)
      return result.output.decode(), await session.put({'a': 'b'})

    text, put = _play(fill, caps=box.Caps(disk_bytes=4 << 20))
    written = dict(line.split() for line in text.splitlines())
    for base in ('/', '/dev', '/proc', '/run'):
      self.assertEqual(written[base], '0', base)
    for base in ('/dev/shm', '/tmp', '/box'):
      self.assertLessEqual(int(written[base]), 4, base)
    self.assertFalse(put.ok)  # the policy filled it: an answer, no exception
    self.assertEqual(put.status, 'exited')

  @parameterized.product(level=_LEVELS)
  def test_fork_bomb_is_a_result_and_the_session_goes_on(self, level):
    source = """
import os, time
while True:
  try: os.fork()
  except OSError: time.sleep(0.01)
"""

    async def bomb(session):
      result = await session.python(source, wall_seconds=1)
      return result.status, await _fine(session)

    status, fine = _play(bomb, level)
    self.assertIn(status, ('timeout', 'memory'))
    self.assertTrue(fine)

  @parameterized.product(level=_LEVELS)
  def test_big_allocation_is_a_memory_error(self, level):

    async def allocate(session):
      result = await session.python('x = bytearray(2 << 30)')
      return result, await _fine(session)

    result, fine = _play(allocate, level)
    self.assertEqual(result.code, 1)
    self.assertIn(b'MemoryError', result.output)
    self.assertTrue(fine)

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

  @parameterized.product(level=_LEVELS)
  def test_links_and_devices_are_not_read_or_written_through(self, level):
    source = """
import os
open('real', 'w').write('x' * 10)
open('big', 'w').write('x' * 100_000)
os.symlink('/etc/passwd', 'link')
os.symlink('/proc/self', 'dir')
os.symlink('real', 'inner')
os.mkfifo('pipe')
os.mkdir('sub')
"""

    async def read(session):
      await session.python(source)
      paths = ['real', 'big', 'link', 'dir/status', 'inner', 'pipe', 'sub']
      files = await session.get([*paths, 'none', '../etc/passwd', 'sub/..'])
      put = await session.put({'inner': 'new', 'deep/er/file': b'\xff'})
      through = await session.put({'dir/x': 'y'})
      return (
          files,
          put.ok,
          through.ok,
          await session.get(['real', 'inner', 'deep/er/file']),
      )

    files, put, through, after = _play(read, level)
    self.assertEqual(files, {'real': b'x' * 10})
    self.assertTrue(put)
    self.assertFalse(through)
    self.assertEqual(
        after, {'real': b'x' * 10, 'inner': b'new', 'deep/er/file': b'\xff'}
    )

  @parameterized.product(level=_LEVELS)
  def test_no_orphan_survives_its_command(self, level):
    marker = f'{time.time_ns() % 10**6 + 10**6}.25'

    async def orphan(session):
      start = time.monotonic()
      result = await session.exec(
          f'setsid sleep {marker} & (sleep {marker} &) ; echo done'
      )
      return result.output, time.monotonic() - start

    output, seconds = _play(orphan, level)
    self.assertEqual(output, b'done\n')
    self.assertLess(seconds, 10)
    for entry in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
      with contextlib.suppress(OSError):
        self.assertNotIn(marker.encode(), entry.read_bytes())

  def test_output_is_bounded_and_keeps_both_ends(self):
    command = 'echo first; head -c 100000000 /dev/zero; echo last'

    async def shout(session):
      return await session.exec(command, output_bytes=1000)

    result = _play(shout)
    self.assertTrue(result.ok)
    self.assertLen(result.output, 1000)
    self.assertEqual(result.dropped, 100_000_011 - 1000)
    self.assertStartsWith(result.output, b'first\n')
    self.assertEndsWith(result.output, b'last\n')

  @parameterized.parameters(
      ('time.sleep(60)', 0.3, 10.0),
      ('while True: pass', 30.0, 0.2),
  )
  def test_deadlines(self, body, wall, cpu):

    async def hang(session):
      start = time.monotonic()
      result = await session.python(
          f'import time\n{body}', wall_seconds=wall, cpu_seconds=cpu
      )
      return result.status, time.monotonic() - start

    status, seconds = _play(hang)
    self.assertEqual(status, 'timeout')
    self.assertLess(seconds, 15)

  @parameterized.product(level=_LEVELS)
  def test_nothing_is_left_for_the_next_session(self, level):
    mess = """
import os
for base in ('/tmp', '/dev/shm', '.'):
  try:
    for name in ('conftest.py', 'evil.zip', 'data.pkl', '.hidden'):
      open(f'{base}/{name}', 'w').write('poison')
    os.makedirs(base + '/d' * 500)  # deeper than a recursive delete likes
    os.mkdir(f'{base}/locked')
    open(f'{base}/locked/f', 'w').close()
    os.chmod(f'{base}/locked', 0)
  except OSError as e: print(type(e).__name__)
os.chmod('.', 0)
"""
    bare = level is _LANDLOCK

    async def main():
      async with sandbox.Pool(1, level=level) as pool:
        async with pool.session() as session:
          result = await session.python(mess)
          first = session._box
        async with pool.session() as session:
          dirs = '.' if bare else '/box /tmp /dev/shm'
          seen = await session.exec(f'find {dirs} | wc -l; stat -c %a .')
          return result, seen, first is session._box

    result, seen, reused = asyncio.run(main())
    self.assertTrue(result.ok)
    # Landlock gives no /tmp and no /dev/shm at all.
    self.assertEqual(result.output, b'PermissionError\n' * 2 if bare else b'')
    self.assertEqual(seen.output, b'1\n700\n' if bare else b'3\n700\n')
    self.assertTrue(reused)

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


class SessionTest(parameterized.TestCase):

  def test_dead_runner_is_an_infrastructure_error(self):

    async def die(session):
      await session.exec('true')
      session._box._process.kill()
      with self.assertRaises(sandbox.SandboxError):
        await session.exec('true')
        await session.exec('true')
      with self.assertRaises(sandbox.SandboxError):
        await session.exec('true')

    _play(die)

  def test_cancelled_command_costs_the_sandbox_not_the_pool(self):

    async def main():
      async with sandbox.Pool(1) as pool:
        async with pool.session() as session:
          with self.assertRaises(TimeoutError):
            await asyncio.wait_for(session.exec('sleep 60'), 0.3)
        async with pool.session() as session:
          return await _fine(session)

    self.assertTrue(asyncio.run(main()))

  @parameterized.product(level=_LEVELS)
  def test_pool_leaves_nothing_behind(self, level):
    before = set(_descendants(os.getpid()))
    dirs = set(pathlib.Path(tempfile.gettempdir()).glob('sandbox-*'))
    mounts = pathlib.Path('/proc/self/mounts').read_text()
    files = len(os.listdir('/proc/self/fd'))

    async def main():
      async with sandbox.Pool(2, level=level) as pool:

        async def one(k):
          async with pool.session() as session:
            out = await session.exec(f'sleep 100 & echo {k}')
            return int(out.output)

        return await asyncio.gather(*(one(k) for k in range(40)))

    self.assertEqual(asyncio.run(main()), list(range(40)))
    self.assertEqual(set(_descendants(os.getpid())) - before, set())
    left = set(pathlib.Path(tempfile.gettempdir()).glob('sandbox-*'))
    self.assertEqual(left - dirs, set())
    self.assertEqual(pathlib.Path('/proc/self/mounts').read_text(), mounts)
    self.assertEqual(len(os.listdir('/proc/self/fd')), files)

  def test_unused_session_takes_no_sandbox(self):

    async def main():
      async with sandbox.Pool(1) as pool:
        async with contextlib.AsyncExitStack() as stack:
          for _ in range(50):
            await stack.enter_async_context(pool.session())
          session = await stack.enter_async_context(pool.session())
          return await _fine(session)

    self.assertTrue(asyncio.run(main()))

  @unittest.skipUnless(
      os.geteuid() == 0 and _HAS_BWRAP, 'needs root and bubblewrap'
  )
  def test_works_below_an_ordinary_user(self):
    with tempfile.TemporaryDirectory() as home:
      os.chmod(home, 0o755)
      package = pathlib.Path(home, 'composer_jax', 'agents')
      package.mkdir(parents=True)
      for module in ('box', 'isolation', 'runner', 'sandbox'):
        shutil.copy(_ROOT / 'composer_jax/agents' / f'{module}.py', package)
      program = f"""
import asyncio, sys
sys.path.insert(0, {home!r})
from composer_jax.agents import box, sandbox
async def main(name):
  async with sandbox.Pool(2, level=box.Level(name, '')) as pool:
    async with pool.session() as s:
      bomb = await s.python('import os\\nwhile 1:\\n try: os.fork()\\n'
                            ' except OSError: pass', wall_seconds=0.5)
      kill = await s.python('import os; os.kill(-1, 9)')
      read = await s.exec('cat /etc/passwd {home}/composer_jax/agents/box.py')
      return bomb.status, read.output.count(b'root'), await s.exec('echo hi')
for name in ('bubblewrap', 'landlock'):
  out = asyncio.run(main(name))
  assert out[0] in ('timeout', 'memory') and out[1] == 0, out
  assert out[2].output == b'hi\\n', out
print('fine', box.describe().name)
"""
      out = subprocess.run(
          [box._interpreter(), '-c', program],
          user=54321,
          group=54321,
          extra_groups=[],
          cwd=home,
          capture_output=True,
          text=True,
      )
    self.assertEqual(out.stdout, 'fine bubblewrap\n', out.stderr)

  def test_refusal_is_one_clear_line(self):
    level = box.Level('none', 'bubblewrap: missing')

    async def main():
      async with sandbox.Pool(1, level=level):
        pass

    with self.assertRaisesRegex(
        sandbox.SandboxError, '^no isolation .*missing$'
    ):
      asyncio.run(main())

  def test_describe_names_a_level_and_a_reason(self):
    level = sandbox.describe()
    self.assertIn(level.name, ('bubblewrap', 'landlock'))
    self.assertNotEmpty(level.reason)


class RunnerTest(parameterized.TestCase):

  @parameterized.parameters(
      (1, True), (1, 1.0), ([1], (1,)), ('1', 1), (None, False), ({'a': 1}, [])
  )
  def test_canonical_tells_types_apart(self, a, b):
    self.assertNotEqual(runner.canonical(a), runner.canonical(b))

  def test_canonical_ignores_the_order_of_keys(self):
    self.assertEqual(
        runner.canonical({'b': [1, 'é'], 'a': 2.5}), "{'a':2.5,'b':[1,'\\xe9']}"
    )
    self.assertEqual(
        runner.canonical({'a': 1, 'b': 2}), runner.canonical({'b': 2, 'a': 1})
    )

  def test_canonical_refuses_subclasses_and_objects(self):
    lie = type('Lie', (int,), {'__eq__': lambda a, b: True})
    endless = []
    endless.append(endless)
    for value in (lie(3), object(), {1: 2}, {1}, [lie(0)], endless, b'x'):
      with self.assertRaises(TypeError):
        runner.canonical(value)

  def test_the_runner_needs_only_the_standard_library(self):
    out = subprocess.run(
        [
            sys.executable,
            '-I',
            '-S',
            '-c',
            box._BOOTSTRAP,
            json.dumps(
                [{'composer_jax.agents.runner': 'def main(): print("up")'}, {}]
            ),
        ],
        capture_output=True,
        text=True,
    )
    self.assertEqual(out.stdout, 'up\n', out.stderr)


if __name__ == '__main__':
  absltest.main()
