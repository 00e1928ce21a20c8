"""Landlock and seccomp through ctypes, for the program inside a sandbox.

Standard library only: the sandbox gets this file as source text.
"""

import ctypes
import os
import platform
import struct
import sys

# Denied system calls: (x86_64, aarch64); -1 where there is none.
_DENIED = {
    'ptrace': (101, 117),
    'process_vm_readv': (310, 270),
    'process_vm_writev': (311, 271),
    'kcmp': (312, 272),
    'pidfd_getfd': (438, 438),
    'mount': (165, 40),
    'umount2': (166, 39),
    'pivot_root': (155, 41),
    'open_tree': (428, 428),
    'move_mount': (429, 429),
    'fsopen': (430, 430),
    'mount_setattr': (442, 442),
    'unshare': (272, 97),
    'setns': (308, 268),
    'bpf': (321, 280),
    'perf_event_open': (298, 241),
    'userfaultfd': (323, 282),
    'io_uring_setup': (425, 425),
    'add_key': (248, 217),
    'request_key': (249, 218),
    'keyctl': (250, 219),
    'shmget': (29, 194),  # System V and message queues outlive a process,
    'shmat': (30, 196),  # and whose they are, Landlock does not ask
    'shmctl': (31, 195),
    'semget': (64, 190),
    'semop': (65, 193),
    'semctl': (66, 191),
    'semtimedop': (220, 192),
    'msgget': (68, 186),
    'msgsnd': (69, 189),
    'msgrcv': (70, 188),
    'msgctl': (71, 187),
    'mq_open': (240, 180),
    'mq_unlink': (241, 181),
    'memfd_create': (319, 279),  # memory of no process and no directory
    'memfd_secret': (447, 447),
    'io_setup': (206, 0),  # takes from a number that the machine has once
    'inotify_init': (253, -1),  # tells what others read
    'inotify_init1': (294, 26),
    'setpriority': (141, 140),  # would reach process 1, same user
    'ioprio_set': (251, 30),
    'sched_setparam': (142, 118),
    'sched_setscheduler': (144, 119),
    'sched_setattr': (314, 274),
    'sched_setaffinity': (203, 122),
    'name_to_handle_at': (303, 264),
    'open_by_handle_at': (304, 265),
    'fanotify_init': (300, 262),
    'quotactl': (179, 60),
    'acct': (163, 89),
}
_PRLIMIT, _CLONE, _CLONE3, _SOCKET = (
    (302, 261),
    (56, 220),
    (435,) * 2,
    (41, 198),
)
_CLONE_NEWUSER = 0x10000000
# A lock on a file that all can read is seen by all. None is taken, so programs
# that lock their own files go on, and whoever asks finds none.
_FLOCK, _FCNTL = (73, 32), (72, 25)
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW and those of open files
_LEASE, _NOTIFY = 1024, 1026
_SOCKETPAIR, _DATAGRAM = (53, 199), 2
# Landlock lets a user change what it owns, wherever that is. Programs that set
# modes and times (cp, touch) go on, and nothing changes.
_UNCHANGED = {
    'chmod': (90, -1),
    'fchmod': (91, 52),
    'fchmodat': (268, 53),
    'fchmodat2': (452, 452),
    'utime': (132, -1),
    'utimes': (235, -1),
    'futimesat': (261, -1),
    'utimensat': (280, 88),
}
_OWNED = {
    'chown': (92, -1),
    'fchown': (93, 55),
    'lchown': (94, -1),
    'fchownat': (260, 54),
    'setxattr': (188, 5),
    'lsetxattr': (189, 6),
    'fsetxattr': (190, 7),
    'removexattr': (197, 14),
    'lremovexattr': (198, 15),
    'fremovexattr': (199, 16),
    'setxattrat': (463, 463),
    'removexattrat': (466, 466),
    'file_setattr': (469, 469),
}
_IOCTL, _SET_FLAGS = (16, 29), (0x40086602, 0x401C5820)
_MOVE = 0x2000  # Landlock's right to move files between directories
_ARCHS = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option, *args):
  padded = (*args, 0, 0, 0, 0)[:4]
  if _LIBC.prctl(option, *(ctypes.c_ulong(a) for a in padded)):
    raise OSError(ctypes.get_errno(), f'prctl({option})')


def _syscall(number, *args):
  out = _LIBC.syscall(ctypes.c_long(number), *args)
  if out < 0:
    raise OSError(ctypes.get_errno(), f'system call {number}')
  return out


def _op(code, k, yes=0, no=0):
  return struct.pack('HBBI', code, yes, no, k)


def _load(offset):
  return _op(0x20, offset)


def _answer(errno):
  return _op(0x06, 0x00050000 | errno)


def _answers(calls, errno):
  """Answers calls without making them; errno 0: as if they had been made."""
  column, _ = _ARCHS[platform.machine()]
  out = []
  for number in (numbers[column] for numbers in calls):
    out += [] if number < 0 else [_op(0x15, number, 0, 1), _answer(errno)]
  return out


def _by_argument(call, errnos, mask=0xFFFFFFFF):
  """Answers a call whose second argument is one of the keys of `errnos`."""
  column, _ = _ARCHS[platform.machine()]
  body = [_load(24), _op(0x54, mask)]
  for value, errno in errnos.items():
    body += [_op(0x15, value, 0, 1), _answer(errno)]
  body.append(_load(0))
  return [_op(0x15, call[column], 0, len(body)), *body]


def _begin():
  """Ends a process of another architecture, and loads the call's number."""
  column, arch = _ARCHS[platform.machine()]
  program = [_load(4), _op(0x15, arch, 1, 0), _op(0x06, 0x80000000), _load(0)]
  if not column:  # x32 calls have other numbers
    program += [_op(0x35, 0x40000000, 0, 1), _answer(1)]
  return program


def _seccomp_program(network):
  """BPF: errno 1 for what is denied, errno 38 for clone3 (glibc then uses
  clone, whose flags can be read)."""
  column, _ = _ARCHS[platform.machine()]
  program = _begin() + _answers(_DENIED.values(), 1) + _answers([_FLOCK], 0)
  locks = dict.fromkeys(_LOCKS, 0) | {_LEASE: 1, _NOTIFY: 1}
  program += _by_argument(_FCNTL, locks)
  if not network:  # one of a pair of datagrams could send to any path
    program += _answers([_SOCKET], 1)
    program += _by_argument(_SOCKETPAIR, {_DATAGRAM: 1}, 0xF)
  program += _answers([_CLONE3], 38)
  # prlimit: of oneself (0) only.
  program += [_op(0x15, _PRLIMIT[column], 0, 4), _load(16)]
  program += [_op(0x15, 0, 1, 0), _answer(1), _load(0)]
  program += [_op(0x15, _CLONE[column], 0, 3), _load(16)]
  program += [_op(0x45, _CLONE_NEWUSER, 0, 1), _answer(1)]
  return b''.join([*program, _op(0x06, 0x7FFF0000)])


def _metadata_program():
  """BPF: no change to a file but to what is in it."""
  program = _begin() + _answers(_UNCHANGED.values(), 0)
  program += _answers(_OWNED.values(), 1)
  program += _by_argument(_IOCTL, dict.fromkeys(_SET_FLAGS, 1))
  return b''.join([*program, _op(0x06, 0x7FFF0000)])


class _Filter(ctypes.Structure):
  _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_char_p)]


def _filter(code):
  program = _Filter(len(code) // 8, code)  # alive while the kernel reads it
  _prctl(22, 2, ctypes.addressof(program))


def _landlock(fs, net, scope, rules=()):
  """Enters a Landlock domain; `rules` are (path, rights) pairs."""
  attributes = struct.pack('QQQ', fs, net, scope)
  ruleset = _syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
  for path, rights in rules:
    if not os.path.exists(path):
      continue
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
      rights &= 0x4007  # execute, write, read, truncate
    _syscall(445, ruleset, 1, struct.pack('=Qi', rights, fd), 0)
    os.close(fd)
  _prctl(38, 1)
  _syscall(446, ruleset, 0)
  os.close(ruleset)


class Jail:
  """The restrictions of the runner and of the children it forks.

  Attributes:
    dirs: writable directories, wiped by `reset`; the first is the home.
    bare: no namespaces around: Landlock has to do their work.
    shared: and its user has files elsewhere.
  """

  def __init__(self, dirs, bare, shared):
    self.dirs = dirs
    self.bare = bare
    self.shared = shared

  def enter_server(self):
    """Confines the runner; every child inherits the filter of system calls."""
    if self.bare:
      _prctl(36, 1)  # orphans come to us, so that they can be reaped
      # From here kill(-1) ends at our own children. Any domain denies moves
      # between directories unless it allows them.
      _landlock(_MOVE, 0, 2, [('/', _MOVE)])
    _prctl(4, 0)
    _prctl(38, 1)
    _filter(_seccomp_program(network=not self.bare))

  def enter_child(self):
    """Confines a child, before it reads its request."""
    if self.bare:
      everything, read = 0xFFFF, 0xD  # read = execute, read file, read dir
      shared = ['/usr', '/lib', '/lib64', '/bin', sys.base_prefix]
      devices = [(f'/dev/{d}', 6) for d in ('null', 'zero', 'urandom')]
      rules = [(p, read) for p in shared] + devices
      _landlock(everything, 3, 3, rules + [(d, everything) for d in self.dirs])

  def enter_policy(self):
    """Confines a child that runs what a policy wrote, rather than our code."""
    _prctl(4, 1)  # the runner reads what it maps
    if self.shared:
      _filter(_metadata_program())
