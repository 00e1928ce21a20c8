"""The attack list, as a module that needs only the standard library.

An ordinary user who shares no packages with us can run it, too. Every attack
gives a pair: what happened and what should have.
"""

import asyncio
import contextlib
import ctypes
import os
import pathlib
import pwd
import socket
import struct
import subprocess
import sys
import tempfile
import time

from composer_jax.sandbox import box
from composer_jax.sandbox import pool as pool_lib

# Each prints SAFE, or what it achieved. {pid}: a process of the host.
# {port}: a listening port. {file}: a readable file of the host.
ATTACKS = {
    'connect_to_loopback': """
import socket
socket.create_connection(('127.0.0.1', {port}), timeout=2)
print('CONNECTED')""",
    'read_grader': "print('READ', open('{file}').read())",
    'read_passwd': """
text = open('/etc/passwd').read()
if {users!r} & {{line.partition(':')[0] for line in text.splitlines()}}:
  print('READ')""",
    'read_etc': """
import os
for name in ('shadow', 'ssh', 'ssl', 'hostname', 'resolv.conf', 'machine-id'):
  if os.access(f'/etc/{{name}}', os.R_OK): open(f'/etc/{{name}}'); print(name)""",
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
  for s in range(1, signal.SIGRTMAX + 1):
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
    'zip_slip_and_pickle': """
import io, pickle, zipfile
data = io.BytesIO()
with zipfile.ZipFile(data, 'w') as z: z.writestr('../../../usr/attack', 'x')
zipfile.ZipFile(data).extractall('.')
try: open('/usr/attack').read(); print('ESCAPED')
except OSError: pass
class Evil:
  def __reduce__(self): return exec, ("open('/usr/attack', 'w')",)
pickle.loads(pickle.dumps(Evil()))""",
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
    'memory_of_nobody': """
import ctypes, os
libc = ctypes.CDLL(None)
try: os.memfd_create('x'); print('MEMFD')
except OSError: pass
for name, number in (('secret', 447), ('io_setup', {calls[io_setup]})):
  if libc.syscall(number, 128, ctypes.byref(ctypes.c_long())) >= 0: print(name)
for name in ('inotify_init', 'inotify_init1'):
  if getattr(libc, name)(0) >= 0: print(name)""",
    'queues_of_the_host': """
import ctypes
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(4096)
if libc.msgrcv({queue}, buffer, 1024, 0, 0o4000) >= 0: print('RECEIVED')
if libc.msgctl({queue}, 0, None) == 0: print('REMOVED')""",
    'datagrams_to_the_host': """
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK):
  try: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b'x', '{socket}')
  except OSError: pass""",
    'files_of_the_host': """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
path = '{file}'
for call in (lambda: os.chmod(path, 0o666), lambda: os.utime(path, (1, 1)),
             lambda: os.chown(path, -1, os.getgid()),
             lambda: os.setxattr(path, 'user.x', b'y'),
             lambda: os.truncate(path, 0), lambda: os.unlink(path),
             lambda: libc.syscall(452, -100, path.encode(), 0o666, 0),
             lambda: os.link(path, 'mine'), lambda: os.rename(path, 'mine')):
  try: call()
  except OSError: pass""",
    'tracing_and_rings': """
import ctypes
libc = ctypes.CDLL(None)
for name, number in (('io_uring', 425), ('bpf', 321), ('userfaultfd', 323),
                     ('keyctl', 250), ('perf', 298)):
  if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: print(name)""",
}
FILL = """
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
BOMB = """
import os, time
while True:
  try: os.fork()
  except OSError: time.sleep(0.01)
"""
# Holds memory that no process has resident, under a cap of 64 MB.
HIDERS = {
    'shared': """
import mmap, time
held = mmap.mmap(-1, 300 << 20)
for k in range(300):
  held[k << 20:(k + 1) << 20] = bytes(1 << 20)
  held.madvise(mmap.MADV_DONTNEED)
time.sleep(20)""",
    'zero': """
import mmap, os, time
zero = os.open('/dev/zero', os.O_RDWR)
held = mmap.mmap(zero, 300 << 20)
for k in range(300):
  held[k << 20:(k + 1) << 20] = bytes(1 << 20)
  held.madvise(mmap.MADV_DONTNEED)
time.sleep(20)""",
    'hidden': """
import ctypes, mmap, time
held = mmap.mmap(-1, 300 << 20)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
time.sleep(20)""",
    'sockets': """
import socket, time
pairs = [socket.socketpair() for _ in range(120)]
for a, b in pairs:
  a.setblocking(False)
  try:
    while True: a.send(bytes(1 << 16))
  except OSError: pass
time.sleep(20)""",
    'inodes': """
import os, time
for k in range(100_000): os.mknod(f'/tmp/{k}')
time.sleep(20)""",
}
# Says whether it sees the lock that its twin in another sandbox holds.
LOCKS = {
    'flock': "fcntl.flock(os.open('/usr/bin/env', 0), {how})",
    'lockf': "fcntl.lockf(os.open('/dev/null', 2), {how})",
    'open file': (
        "fcntl.fcntl(os.open('/dev/null', 2), {command},"
        " struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0))"
    ),
    'lease': (
        "fcntl.fcntl(os.open('/usr/bin/env', 0), fcntl.F_SETLEASE,"
        ' fcntl.F_RDLCK)'
    ),
}
SEE = """
import fcntl, os, struct
for path, mode in (('/usr/bin/env', 0), ('/dev/null', 2)):
  asked = struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0)
  got = fcntl.fcntl(os.open(path, mode), fcntl.F_GETLK, asked)
  if struct.unpack_from('h', got)[0] != fcntl.F_UNLCK: print('SEEN')
"""
_THIEF = """
import ctypes, os
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # own /proc files can be opened
try: pipe = os.open('/proc/self/fd/1', os.O_RDONLY)
except OSError: pipe = None
while True:
  os.write(1, b'x')
  if pipe: os.read(pipe, 1)
"""
_LINKS = """
import os
open('real', 'w').write('x' * 10)
open('big', 'w').write('x' * 100_000)
os.symlink('/etc/passwd', 'link')
os.symlink('/proc/self', 'dir')
os.symlink('real', 'inner')
os.mkfifo('pipe')
os.mkdir('sub')
"""
_MESS = """
import os, pickle, zipfile
for base in {dirs}:
  with zipfile.ZipFile(f'{{base}}/evil.zip', 'w') as z: z.writestr('../../x', 'y')
  pickle.dump(print, open(f'{{base}}/data.pkl', 'wb'))
  for name in ('conftest.py', 'sitecustomize.py', '.hidden'):
    open(f'{{base}}/{{name}}', 'w').write('poison')
  os.makedirs(base + '/d' * 500)  # deeper than a recursive delete likes
  os.mkdir(f'{{base}}/locked')
  open(f'{{base}}/locked/f', 'w').close()
  os.chmod(f'{{base}}/locked', 0)
os.chmod('.', 0)
"""


def _facts(path):
  found = os.stat(path)
  return (
      *(found.st_mode, found.st_mtime_ns, found.st_gid, found.st_size),
      os.listxattr(path),
  )


async def _programs(session):
  """The short ones, against real things of the host."""
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(socket.create_server(('127.0.0.1', 0)))
    victim = subprocess.Popen(['sleep', '60'])
    stack.callback(victim.wait)
    stack.callback(victim.kill)
    secret = stack.enter_context(tempfile.NamedTemporaryFile('w', suffix='.py'))
    secret.write('expected = 42')
    secret.flush()
    os.chmod(secret.name, 0o644)
    libc = ctypes.CDLL(None)
    queue = libc.msgget(0, 0o1666)  # of this user, in a space of the machine
    stack.callback(libc.msgctl, queue, 0, None)
    libc.msgsnd(queue, struct.pack('l', 1) + b'x', 1, 0)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    os.chmod(folder, 0o755)
    inbox = stack.enter_context(
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    )
    inbox.bind(f'{folder}/inbox')
    os.chmod(f'{folder}/inbox', 0o666)
    inbox.setblocking(False)
    before = _facts(secret.name)
    facts = {
        'users': {p.pw_name for p in pwd.getpwall()} - {'root', 'sandbox'},
        'queue': queue,
        'socket': f'{folder}/inbox',
        'calls': {'io_setup': 0 if os.uname().machine == 'aarch64' else 206},
        'port': listener.getsockname()[1],
        'pid': victim.pid,
        'file': secret.name,
    }
    for name, source in ATTACKS.items():
      body = f'try:\n  exec({source.format(**facts)!r})\nexcept OSError: pass'
      result = await session.python(body + "\nprint('SAFE')")
      # What the forger wrote went into its own output: nowhere else to go.
      text = result.output.decode(errors='replace').replace('\0', '')
      yield name, (result.status, text, victim.poll()), (
          'exited',
          'SAFE\n',
          None,
      )
    yield 'files_are_as_before', _facts(secret.name), before
    sent = libc.msgctl(queue, 0, None)
    yield 'queue_is_still_there', sent, 0
    try:
      got = inbox.recv(9)
    except BlockingIOError:
      got = None
    yield 'nobody_wrote', got, None


async def _fork_bomb(session):
  result = await session.python(BOMB, wall_seconds=1)
  return result.status in ('timeout', 'memory'), True


async def _endless_loop(session):
  result = await session.python('while True: pass', cpu_seconds=0.2)
  return result.status, 'timeout'


async def _sleep(session):
  start = time.monotonic()
  result = await session.exec('sleep 3600', wall_seconds=0.3)
  return (result.status, time.monotonic() - start < 600), ('timeout', True)


async def _big_allocation(session):
  result = await session.python('x = bytearray(2 << 30)')
  return (result.code, b'MemoryError' in result.output), (1, True)


async def _hundred_megabytes(session):
  command = 'echo first; head -c 100000000 /dev/zero; echo last'
  result = await session.exec(command, output_bytes=1000)
  ends = result.output[:6], result.output[-5:], len(result.output)
  return (*ends, result.dropped), (b'first\n', b'last\n', 1000, 99_999_011)


async def _steal_the_output(session):
  """What the runner was told it may read is gone when it reads."""
  result = await session.python(_THIEF, wall_seconds=2, cpu_seconds=60)
  return result.status, 'timeout'


async def _orphan(session):
  marker = f'{time.time_ns() % 10**6 + 10**6}.25'
  start = time.monotonic()
  result = await session.exec(
      f'setsid sleep {marker} & (sleep {marker} &) ; echo done'
  )
  quick = time.monotonic() - start < 600
  alive = []
  for entry in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    with contextlib.suppress(OSError):
      alive += [entry] * (marker.encode() in entry.read_bytes())
  return (result.output, quick, alive), (b'done\n', True, [])


async def _links(session):
  await session.python(_LINKS)
  paths = ['real', 'big', 'link', 'dir/status', 'inner', 'pipe', 'sub']
  files = await session.get([*paths, 'none', '../etc/passwd', 'sub/..'])
  put = await session.put({'inner': 'new', 'deep/er/file': b'\xff'})
  through = await session.put({'dir/x': 'y'})
  after = await session.get(['real', 'inner', 'deep/er/file'])
  return (files, put.ok, through.ok, after), (
      {'real': b'x' * 10},
      True,
      False,
      {'real': b'x' * 10, 'inner': b'new', 'deep/er/file': b'\xff'},
  )


_LONG = (
    _fork_bomb,
    _endless_loop,
    _sleep,
    _big_allocation,
    _hundred_megabytes,
    _steal_the_output,
    _orphan,
    _links,
)


async def _residue(pool, bare):
  """What one session leaves, the next must not find."""
  # Landlock gives no /tmp and no /dev/shm at all.
  dirs = ('.',) if bare else ('/box', '/tmp', '/dev/shm')
  async with pool.session() as session:
    mess = await session.python(_MESS.format(dirs=dirs))
    first = session._box
  async with pool.session() as session:
    seen = await session.exec(f'find {" ".join(dirs)} | wc -l; stat -c %a .')
    reused = session._box is first
  return (mess.ok, seen.output.decode(), reused), (
      True,
      f'{len(dirs)}\n700\n',
      True,
  )


async def _locks(level):
  """Two sandboxes: what one locks, the other must not see."""
  seen = {}
  async with pool_lib.Pool(2, level=level) as pool:
    async with pool.session() as first, pool.session() as second:
      for name, source in LOCKS.items():
        hold = source.format(how='2', command=37)
        probe = source.format(how='6', command=37)
        mine = (
            'import fcntl, os, struct\ntry: {}\nexcept PermissionError: pass\n'
        )
        holder = asyncio.create_task(
            first.python(
                mine.format(hold)
                + "import time\nopen('on', 'w')\ntime.sleep(2)"
            )
        )
        await asyncio.sleep(1)
        out = await second.python(mine.format(probe) + SEE + "print('free')")
        await holder
        seen[name] = out.output
  return seen, dict.fromkeys(LOCKS, b'free\n')


async def play(name):
  """Runs them all at a level; attack -> (what happened, what should)."""
  out = {}
  async with pool_lib.Pool(1, level=box.Level(name, 'forced')) as pool:
    async with pool.session() as session:
      async for attack, got, want in _programs(session):
        out[attack] = got, want
      for attack in _LONG:
        out[attack.__name__] = await attack(session)
        alive = await session.exec('echo $((6*7))', wall_seconds=30)
        out[f'alive after {attack.__name__}'] = alive.output, b'42\n'
    out['locks'] = await _locks(box.Level(name, 'forced'))
    out['residue'] = await _residue(pool, name == 'landlock')
  return out


def dies_when_used(warm):
  """An idle sandbox that the pool still believes in, and hands on."""
  exchange = warm._exchange

  async def dying(message, nonce):
    warm._process.kill()
    warm._process.wait()
    return await exchange(message, nonce)

  warm._exchange = dying


if __name__ == '__main__':
  for level in sys.argv[1:]:
    for attack, (got, want) in asyncio.run(play(level)).items():
      if got != want:
        print(f'{level}: {attack}: {got!r}, want {want!r}')
  print('played', box.describe().name)
