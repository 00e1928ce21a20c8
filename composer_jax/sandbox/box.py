"""One running sandbox: bubblewrap, or Landlock, or a refusal.

What the policy does inside (fork bomb, endless loop, gigabytes of output) is
a `Result`; only a dead or unresponsive runner is a `SandboxError`, an
infrastructure failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

from composer_jax.sandbox import child
from composer_jax.sandbox import disk
from composer_jax.sandbox import etc
from composer_jax.sandbox import isolation

_GRACE_SECONDS = 15.0  # beyond a command's deadline, for a loaded machine
_DIRS = ('/box', '/tmp', '/dev/shm')
_PACKAGE = 'composer_jax.sandbox'
_BOOTSTRAP = f"""
import json, sys, types
sources, options = json.loads(sys.argv[1])
for name, source in sources.items():
  sys.modules[name] = types.ModuleType(name)
  exec(compile(source, name, 'exec'), sys.modules[name].__dict__)
sys.modules['{_PACKAGE}.child'].main(**options)
"""
_serial = itertools.count()

# From strong to weak; anything less is refused.
LEVELS = {
    'bubblewrap': (
        'own users, processes, network and files; read-only system; caps on'
        ' disk, memory, processes'
    ),
    'landlock': (
        'one writable directory, no network, no signals outwards; caps on'
        ' processes and on the memory and files of each'
    ),
}


class SandboxError(RuntimeError):
  """The sandbox itself failed: not the policy's fault."""


class SandboxDied(SandboxError):
  """It did so at work; once may be the machine's doing, twice is not."""


@dataclasses.dataclass(frozen=True)
class Caps:
  """Bounds of one sandbox.

  Attributes:
    disk_bytes: size of each of /box, /tmp and /dev/shm (they live in memory).
    process_bytes: address space of one process.
    memory_bytes: memory of all processes together; every file and socket
      counts with what the kernel keeps for it.
    processes: most processes at one time.
    open_files: most files that a process has open.
  """

  disk_bytes: int = 16 << 20
  process_bytes: int = 512 << 20
  memory_bytes: int = 1 << 30
  processes: int = 64
  open_files: int = 256


@dataclasses.dataclass(frozen=True)
class Result:
  """How a command went.

  Attributes:
    status: 'exited', 'timeout' (processor or elapsed time) or 'memory'.
    code: exit code; minus the signal if one ended it; 0 unless 'exited'.
    output: what it printed, stdout and stderr; the middle may be missing.
    dropped: bytes missing from the middle.
  """

  status: str
  code: int
  output: bytes
  dropped: int

  @property
  def ok(self) -> bool:
    return self.status == 'exited' and self.code == 0


@dataclasses.dataclass(frozen=True)
class Level:
  """What this machine offers: 'bubblewrap', 'landlock' or 'none', and why."""

  name: str
  reason: str


def _interpreter() -> str:
  """A python that other users can read; a virtual environment may not be."""
  for path in ('/usr/bin/python3', '/usr/local/bin/python3'):
    if os.path.exists(path):
      return path
  return os.path.realpath(sys.executable)


def _user() -> dict[str, Any]:
  """Popen arguments: below root every sandbox gets a user of its own.

  bubblewrap started by root would run inside with root's powers over bind
  mounts, and the kernel does not enforce a process limit on root.
  """
  if os.geteuid() != 0:
    return {}
  with open('/proc/self/uid_map') as f:
    ids = sum(int(line.split()[2]) for line in f)
  # A root of a container may own no more than 65536 ids.
  base, span = (200_000, 1 << 25) if ids > 1 << 26 else (10_000, 50_000)
  uid = base + (os.getpid() * 1024 + next(_serial) % 1024) % span
  return {'user': uid, 'group': uid, 'extra_groups': []}


def _python(caps: Caps, dirs: Sequence[str], bare: bool) -> list[str]:
  limits = {
      'RLIMIT_AS': caps.process_bytes,
      'RLIMIT_FSIZE': caps.disk_bytes,
      'RLIMIT_NOFILE': caps.open_files,
      'RLIMIT_CORE': 0,
      # Set inside: outside, all sandboxes of a user would share the count.
      'RLIMIT_NPROC': caps.processes,
  }
  sources = {'composer_jax': '', _PACKAGE: ''}
  for module in (disk, isolation, child):
    sources[module.__name__] = inspect.getsource(module)
  options = {'limits': limits, 'dirs': list(dirs), 'bare': bare}
  options['shared'] = bare and os.geteuid() != 0
  program = [_interpreter(), '-I', '-S', '-B', '-c', _BOOTSTRAP]
  return [*program, json.dumps([sources, options])]


def _bubblewrap(caps: Caps) -> tuple[list[str], list[int]]:
  command = ['bwrap', '--unshare-all', '--unshare-user', '--disable-userns']
  command += ['--cap-drop', 'ALL', '--die-with-parent', '--new-session']
  command += ['--as-pid-1', '--clearenv', '--setenv', 'PATH', '/usr/bin']
  command += ['--setenv', 'HOME', '/box', '--setenv', 'LANG', 'C.UTF-8']
  command += ['--ro-bind', '/usr', '/usr']
  for path in ('/lib', '/lib64', '/bin', '/sbin'):
    if os.path.islink(path):
      command += ['--symlink', os.readlink(path), path]
    elif os.path.isdir(path):
      command += ['--ro-bind', path, path]
  if not _interpreter().startswith('/usr/'):
    command += ['--ro-bind', sys.base_prefix, sys.base_prefix]
  options, fds = etc.bubblewrap()
  command += [*options, '--proc', '/proc', '--dev', '/dev']
  for path in _DIRS:
    command += ['--size', str(caps.disk_bytes), '--tmpfs', path]
  # Both are memory without a cap, and writable, unless remounted.
  command += ['--remount-ro', '/dev', '--remount-ro', '/', '--chdir', '/box']
  return [*command, *_python(caps, _DIRS, bare=False)], fds


def _launch(
    caps: Caps, name: str, stderr: int
) -> tuple[subprocess.Popen[bytes], socket.socket, str | None]:
  """Starts a runner; returns it, our end of its socket, its directory."""
  user = _user()
  work, fds = None, []
  env = {'PATH': '/usr/bin:/bin', 'USER': etc.USER, 'LOGNAME': etc.USER}
  if name == 'bubblewrap':
    command, fds = _bubblewrap(caps)
  else:
    work = tempfile.mkdtemp(prefix='sandbox-')
    env |= {'TMPDIR': work, 'HOME': work}
    if user:
      os.chown(work, user['user'], user['group'])
    caps = dataclasses.replace(caps, processes=_nproc(caps.processes))
    command = _python(caps, (work,), bare=True)
  ours, theirs = socket.socketpair()
  try:
    with theirs:
      process = subprocess.Popen(
          command,
          stdin=theirs,
          stdout=subprocess.DEVNULL,
          stderr=stderr,
          cwd='/',
          start_new_session=True,
          pass_fds=fds,
          env=env,
          **user,
      )
  except OSError:
    ours.close()
    _remove(work)
    raise
  finally:
    for fd in fds:
      os.close(fd)
  return process, ours, work


def _remove(work: str | None) -> None:
  if work:
    shutil.rmtree(work, ignore_errors=True)


def _nproc(processes: int) -> int:
  """A process limit for a user who may already run other things."""
  if os.geteuid() == 0:
    return processes  # every sandbox is a user of its own
  running = 0
  for name in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError):
      if os.stat(f'/proc/{name}').st_uid == os.geteuid():
        running += len(os.listdir(f'/proc/{name}/task'))
  return processes + running


def _try(name: str) -> str:
  """Makes one request of a new sandbox; returns what went wrong, or ''."""
  try:
    process, ours, work = _launch(Caps(), name, subprocess.PIPE)
  except OSError as e:
    return str(e)
  body = json.dumps({'op': 'python', 'source': '', 'cpu': 5}).encode()
  reply = b''
  with ours, contextlib.suppress(OSError):
    ours.settimeout(30)
    ours.sendall(child.REQUEST.pack(bytes(16), len(body), 2, 20.0, 0) + body)
    reply = ours.recv(child.REPLY.size, socket.MSG_WAITALL)
  try:
    process.wait(timeout=_GRACE_SECONDS)  # we hung up
  except subprocess.TimeoutExpired:
    process.kill()
  text = process.communicate()[1].decode(errors='replace').strip()
  _remove(work)
  if reply == child.REPLY.pack(bytes(16), 0, 0, 0, 0, True):
    return ''
  return text.split('\n')[-1] or 'no answer'


@functools.cache
def failure(name: str) -> str:
  """Finds out, by trying, why this machine lacks a level; '' if it has it."""
  if name == 'bubblewrap' and not shutil.which('bwrap'):
    return 'bwrap is not installed'
  return _try(name)


def describe() -> Level:
  """Which isolation this machine gives."""
  bubblewrap = failure('bubblewrap')
  if not bubblewrap:
    who = 'a user of its own' if os.geteuid() == 0 else 'this user'
    return Level('bubblewrap', f'namespaces work; each sandbox is {who}')
  landlock = failure('landlock')
  if not landlock:
    return Level(
        'landlock',
        f'no namespaces ({bubblewrap}); Landlock, seccomp and resource limits'
        ' instead: no cap on total memory or disk',
    )
  return Level(
      'none',
      f'bubblewrap: {bubblewrap}; Landlock with signal scope (Linux 6.12):'
      f' {landlock}. Install bubblewrap >= 0.8 or allow user namespaces',
  )


class Box:
  """One running sandbox and its connection.

  Attributes:
    alive: False once it cannot be used any more.
    clean: no process but the runner and no file, after the last request.
  """

  def __init__(self, caps: Caps, level: Level):
    self._process, self._socket, self._work = _launch(
        caps, level.name, subprocess.DEVNULL
    )
    self._socket.setblocking(False)
    self._lock = asyncio.Lock()
    # Without a process namespace there is no telling whose memory it is.
    bare = level.name != 'bubblewrap'
    self._watched = 0 if bare else caps.memory_bytes
    self.alive = True
    self.clean = False

  @property
  def running(self) -> bool:
    """False once its process has ended.

    What runs inside may outlive that by a moment, and answer once more.
    """
    return self._process.poll() is None

  async def request(
      self, body: Mapping[str, Any], *, wall: float, capacity: int
  ) -> Result:
    """One round trip.

    Raises:
      SandboxDied: the runner is gone, silent or out of step.
      SandboxError: it was so before.
    """
    data = json.dumps(body).encode()
    nonce = secrets.token_bytes(16)
    header = child.REQUEST.pack(nonce, len(data), capacity, wall, self._watched)
    async with self._lock:
      if not self.alive:
        raise SandboxError('sandbox is closed')
      try:
        async with asyncio.timeout(wall + _GRACE_SECONDS):
          return await self._exchange(header + data, nonce)
      except TimeoutError as e:
        self.hang_up()
        raise SandboxDied('sandbox does not answer') from e
      except (ConnectionError, EOFError) as e:
        self.hang_up()
        raise SandboxDied(f'sandbox died: {e!r}') from e
      except BaseException:  # cancelled half way: the reply would be in the way
        self.hang_up()
        raise

  async def _exchange(self, message: bytes, nonce: bytes) -> Result:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(self._socket, message)
    header = await self._read(child.REPLY.size)
    echo, status, code, seen, sent, clean = child.REPLY.unpack(header)
    if echo != nonce:
      raise ConnectionError('reply to another request')
    output = await self._read(sent)
    self.clean = clean
    name = child.STATUSES[status]
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
      name, code = 'timeout', 0
    return Result(name, code, bytes(output), seen - sent)

  async def _read(self, size: int) -> bytearray:
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view = memoryview(data)
    while view:
      count = await loop.sock_recv_into(self._socket, view)
      if not count:
        raise EOFError
      view = view[count:]
    return data

  def hang_up(self) -> None:
    """The runner kills everything and exits when its host is gone."""
    self.alive = False
    self._socket.close()

  async def close(self) -> None:
    self.hang_up()
    await asyncio.to_thread(self._reap)

  def _reap(self) -> None:
    try:
      self._process.wait(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    _remove(self._work)
