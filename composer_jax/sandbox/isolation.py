"""Landlock and seccomp through ctypes, for the program inside a sandbox.

Standard library only: the sandbox gets this file as source text.
"""

import ctypes
import os
import platform
import struct
import sys

# Denied system calls: (x86_64, aarch64).
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
    'shmget': (29, 194),  # System V and message queues outlive a process
    'semget': (64, 190),
    'msgget': (68, 186),
    'mq_open': (240, 180),
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


def _seccomp_program(network):
  """BPF: errno 1 for what is denied, errno 38 for clone3 (glibc then uses
  clone, whose flags can be read)."""
  column, arch = _ARCHS[platform.machine()]
  program = [_load(4), _op(0x15, arch, 1, 0), _op(0x06, 0x80000000), _load(0)]
  if not column:  # x32 calls have other numbers
    program += [_op(0x35, 0x40000000, 0, 1), _answer(1)]
  denied = [numbers[column] for numbers in _DENIED.values()]
  denied += [] if network else [_SOCKET[column]]
  for number in denied:
    program += [_op(0x15, number, 0, 1), _answer(1)]
  program += [_op(0x15, _CLONE3[column], 0, 1), _answer(38)]
  # prlimit: of oneself (0) only.
  program += [_op(0x15, _PRLIMIT[column], 0, 4), _load(16)]
  program += [_op(0x15, 0, 1, 0), _answer(1), _load(0)]
  program += [_op(0x15, _CLONE[column], 0, 3), _load(16)]
  program += [_op(0x45, _CLONE_NEWUSER, 0, 1), _answer(1)]
  return b''.join([*program, _op(0x06, 0x7FFF0000)])


class _Filter(ctypes.Structure):
  _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_char_p)]


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
  """

  def __init__(self, dirs, bare):
    self.dirs = dirs
    self.bare = bare

  def enter_server(self):
    """Confines the runner; every child inherits the filter of system calls."""
    if self.bare:
      _prctl(36, 1)  # orphans come to us, so that they can be reaped
      # From here kill(-1) ends at our own children. Any domain denies moves
      # between directories unless it allows them.
      _landlock(_MOVE, 0, 2, [('/', _MOVE)])
    _prctl(4, 0)
    _prctl(38, 1)
    code = _seccomp_program(network=not self.bare)
    program = _Filter(len(code) // 8, code)  # alive while the kernel reads it
    _prctl(22, 2, ctypes.addressof(program))

  def enter_child(self):
    """Confines a child, before it reads its request."""
    if self.bare:
      everything, read = 0xFFFF, 0xD  # read = execute, read file, read dir
      shared = ['/usr', '/lib', '/lib64', '/bin', sys.base_prefix]
      devices = [(f'/dev/{d}', 6) for d in ('null', 'zero', 'urandom')]
      rules = [(p, read) for p in shared] + devices
      _landlock(everything, 3, 3, rules + [(d, everything) for d in self.dirs])
