"""The program inside a sandbox: one request, one forked child, one reply.

Runs as the first process of the sandbox, from its source text, and talks to
the host over the socket on its standard input. It stays ignorant on purpose:
the CHILD reads the request body, and the reply passes through one buffer that
is zeroed afterwards. A later child, which shares this memory, has nothing to
find about earlier requests (another submission's outputs, say).

After every request all other processes are killed and reaped. As process 1 of
its namespace (or under Landlock's signal scope) it cannot be signalled from
inside; PR_SET_DUMPABLE keeps its memory and descriptors closed; the seccomp
filter keeps others from changing its limits. Standard library only.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback

from composer_jax.sandbox import disk
from composer_jax.sandbox import isolation

# nonce, body bytes, output bytes kept, wall seconds, memory bytes (all
# processes; 0: unwatched)
REQUEST = struct.Struct('>16sIIdQ')
# nonce, status, exit code (negative: signal), output bytes seen and sent,
# whether every writable directory is empty
REPLY = struct.Struct('>16sBiQI?')
STATUSES = ('exited', 'timeout', 'memory')
_TICK_SECONDS = 0.05
_REAP_SECONDS = 10.0
_INODE_BYTES = 1024
_SOCKET_BYTES = 416 << 10  # most that a socket keeps for its reader


def canonical(value, depth=0):
  """Text of a plain value; equal texts mean equal types and equal values.

  Raises:
    TypeError: any type (a subclass, too) outside of the grammar.
  """
  kind = type(value)
  if depth > 50:
    raise TypeError('nested too deeply')
  if value is None or kind in (bool, int, float, str):
    return ascii(value)
  if kind is list or kind is tuple:
    body = ','.join(canonical(v, depth + 1) for v in value)
    return f'[{body}]' if kind is list else f'({body},)'
  if kind is dict and all(type(k) is str for k in value):
    items = (f'{k!a}:{canonical(value[k], depth + 1)}' for k in sorted(value))
    return '{' + ','.join(items) + '}'
  raise TypeError(f'not a plain value: {kind.__name__}')


# ---- what a child does


def _call(source, entry, inputs, out):
  """One line a case: '+' and the canonical value, or '-' and what went wrong.

  The submission could write here itself. It gains nothing: the lines are
  compared with the expected values on the host, which never come in.
  """
  scope = {'__name__': 'submission'}
  try:
    exec(compile(source, 'submission', 'exec'), scope)
    function, broken = scope[entry], None
  except Exception as e:
    function, broken = None, type(e).__name__
  for arguments in inputs:
    try:
      line = broken or '+' + canonical(function(*json.loads(arguments)))
    except Exception as e:
      line = type(e).__name__
    out.write((line if line[0] == '+' else '-' + ascii(line)).encode() + b'\n')
    out.flush()


def _child(connection, size, pipe, jail):
  os.setsid()
  jail.enter_child()
  body = json.loads(_read(connection, size))
  null = os.open(os.devnull, os.O_RDWR)
  shown = null if body['op'] == 'call' else pipe
  for fd, target in enumerate((null, shown, shown)):
    os.dup2(target, fd)  # closes the connection, which is descriptor 0
  if body['op'] != 'reset':  # which may have to make it enterable first
    os.chdir(jail.dirs[0])
  if body['op'] in ('shell', 'python', 'call'):
    jail.enter_policy()
  seconds = max(1, int(body['cpu'] + 0.999))
  resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
  if body['op'] == 'shell':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv('/bin/sh', ['sh', '-c', body['command']])
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.setitimer(signal.ITIMER_PROF, body['cpu'])  # finer than the limit
  with open(pipe, 'wb') as out:
    match body['op']:
      case 'python':
        exec(compile(body['source'], 'main', 'exec'), {'__name__': '__main__'})
      case 'call':
        _call(body['source'], body['entry'], body['inputs'], out)
      case 'put':
        disk.put(body['files'])
      case 'get':
        disk.get(body['paths'], body['limit'], out)
      case 'snapshot':
        disk.snapshot(out)
      case 'restore':
        disk.restore(body['content'])
      case 'reset':
        disk.reset(jail.dirs)


# ---- the server


def _read(connection, size):
  data = bytearray(size)
  view = memoryview(data)
  while view:
    count = connection.recv_into(view)
    if not count:
      raise EOFError
    view = view[count:]
  return data


class _Tape:
  """Keeps the first and the last half of a stream in one fixed buffer."""

  def __init__(self, capacity):
    self._half = max(capacity // 2, 1)
    self._view = memoryview(bytearray(2 * self._half))
    self.seen = 0

  def read(self, fd):
    """Reads once; returns the number of bytes, 0 at the end.

    Raises:
      BlockingIOError: nothing is there, though a poll may have seen some: a
        child can read what it has written.
    """
    half, at = self._half, self.seen
    end = half
    if at >= half:
      at, end = half + (at - half) % half, 2 * half
    count = os.readv(fd, [self._view[at:end]])
    self.seen += count
    return count

  def pieces(self):
    """Views of what is kept, in order."""
    half = self._half
    if self.seen <= 2 * half:
      return [self._view[: self.seen]]
    turn = half + (self.seen - half) % half
    return [self._view[:half], self._view[turn:], self._view[half:turn]]

  def wipe(self):
    used = min(self.seen, len(self._view))
    self._view[:used] = bytes(used)
    self.seen = 0


def _shared_bytes(name, size):
  """Memory that a process shares with its children; key -> bytes.

  It is there until nobody maps it, resident or not. A process that hides what
  it maps is charged for all that it may.
  """
  out = {}
  try:
    with open(f'/proc/{name}/maps') as f:
      for line in f:
        span, rights, offset, _, inode, *path = line.split()
        if rights[3] == 's' and path[:1] == ['/dev/zero']:
          low, high = (int(end, 16) for end in span.split('-'))
          out[inode, offset] = int(offset, 16) + high - low
  except PermissionError:
    return {name: size}
  except OSError:  # gone meanwhile
    return {}
  return out


def _held_bytes(dirs, memory):
  """Memory of all but this process; above `memory`, at least that much."""
  private = shared = total = 0
  sizes = {}
  page = resource.getpagesize()
  for name in os.listdir('/proc'):
    if name.isdigit() and name != '1':
      try:
        with open(f'/proc/{name}/statm', 'rb') as f:
          size, resident, common = (page * int(n) for n in f.read().split()[:3])
      except OSError:
        continue  # gone meanwhile
      sizes[name] = size
      total += resident
      private += resident - common
  nodes = sum((v := os.statvfs(d)).f_files - v.f_ffree for d in dirs)
  with open('/proc/net/sockstat') as f:
    sockets = int(f.readline().split()[2])
  kernel = nodes * _INODE_BYTES + sockets * _SOCKET_BYTES
  if total + kernel <= memory < sum(sizes.values()) + kernel:
    maps = {}
    for name, size in sizes.items():
      for key, held in _shared_bytes(name, size).items():
        maps[key] = max(held, maps.get(key, 0))
    shared = sum(maps.values())
  return max(total, private + shared) + kernel


def _kill_others():
  """Kills and reaps every other process; the end of the session if it cannot.

  The kernel signals all of them under one lock, so no fork slips through; and
  orphans become our children, so no child left means nothing left.
  """
  deadline = time.monotonic() + _REAP_SECONDS
  while True:
    try:
      os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
      pass
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      return
    if time.monotonic() > deadline:
      os._exit(70)
    time.sleep(0.0002)


def _watch(pid, source, tape, connection, wall, memory, dirs):
  """Waits for the child, the deadline, the memory cap or a host hang-up."""
  now = time.monotonic()
  deadline, check = now + wall, now + _TICK_SECONDS
  process = os.pidfd_open(pid)
  poll = select.poll()
  poll.register(source, select.POLLIN)
  poll.register(process, select.POLLIN)
  poll.register(connection, select.POLLRDHUP)
  try:
    while True:
      now = time.monotonic()
      if now >= deadline:
        return 'timeout', 0
      if now >= check and memory:
        check = now + _TICK_SECONDS
        if _held_bytes(dirs, memory) > memory:
          return 'memory', 0
      ready = dict(poll.poll(1000 * min(deadline - now, _TICK_SECONDS)))
      if connection.fileno() in ready:
        _kill_others()
        os._exit(0)
      if source in ready:
        with contextlib.suppress(BlockingIOError):
          if not tape.read(source):
            poll.unregister(source)
      elif process in ready:
        _, status = os.waitpid(pid, 0)
        return 'exited', os.waitstatus_to_exitcode(status)
  finally:
    os.close(process)


def _is_clean(dirs):
  """True if nothing is left of any request, not even a directory's mode."""
  try:
    for path in dirs:
      with os.scandir(path) as entries:
        if next(entries, None) or os.stat(path).st_mode & 0o777 != 0o700:
          return False
  except OSError:
    return False
  return True


def _serve_one(connection, jail, tapes):
  header = _read(connection, REQUEST.size)
  nonce, size, capacity, wall, memory = REQUEST.unpack(header)
  if capacity not in tapes:
    tapes[capacity] = _Tape(capacity)
  tape = tapes[capacity]
  source, pipe = os.pipe()
  os.set_blocking(source, False)
  pid = os.fork()
  if not pid:
    code = 1
    try:
      os.close(source)
      _child(connection, size, pipe, jail)
      code = 0
    except SystemExit as e:
      code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
      traceback.print_exc()
    finally:
      try:
        sys.stdout.flush()
        sys.stderr.flush()
      finally:
        os._exit(code & 0xFF)
  os.close(pipe)
  status, code = _watch(pid, source, tape, connection, wall, memory, jail.dirs)
  _kill_others()
  with contextlib.suppress(BlockingIOError):
    while tape.read(source):
      pass
  os.close(source)
  if select.select([connection], [], [], 0)[0]:
    os._exit(71)  # the child left a part of its request: out of step
  pieces = tape.pieces()
  sent = sum(len(p) for p in pieces)
  status = STATUSES.index(status)
  clean = _is_clean(jail.dirs)
  connection.sendall(REPLY.pack(nonce, status, code, tape.seen, sent, clean))
  for piece in pieces:
    connection.sendall(piece)
  tape.wipe()


def _default_signals():
  """Takes every handler away, those that whoever started us left included.

  Process 1 is spared by the kernel what it has no handler for, and python
  comes with one for SIGINT.
  """
  signal.pthread_sigmask(signal.SIG_SETMASK, [])
  for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_DFL)
  for number in (signal.SIGPIPE, signal.SIGXFSZ):  # an error, as in any python
    signal.signal(number, signal.SIG_IGN)


def main(limits, dirs, bare, shared):
  """Serves until the host hangs up.

  Args:
    limits: name of a resource limit -> its value, soft and hard.
    dirs: writable directories; the first is the home.
    bare: True without namespaces.
    shared: True if, without them, other files belong to the same user.
  """
  for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
  _default_signals()
  with open('/proc/self/oom_score_adj', 'w') as f:
    f.write('1000')  # if the machine runs out of memory, this goes first
  for path in dirs:
    os.chmod(path, 0o700)
  jail = isolation.Jail(dirs, bare, shared)
  jail.enter_server()
  gc.freeze()
  connection = socket.socket(fileno=0)
  tapes = {}
  try:
    while True:
      _serve_one(connection, jail, tapes)
  except (EOFError, ConnectionError):
    pass
