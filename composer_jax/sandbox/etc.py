"""The /etc of a sandbox: enough to know oneself, the same on every machine."""

from __future__ import annotations

import os

USER = 'sandbox'
_ID = 65534
_FILES = {
    'passwd': (
        'root:x:0:0:root:/root:/bin/sh\n'
        f'{USER}:x:{_ID}:{_ID}:{USER}:/box:/bin/sh\n'
    ),
    'group': f'root:x:0:\n{USER}:x:{_ID}:\n',
    'hosts': f'127.0.0.1 localhost {USER}\n',
    'nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n',
}


def bubblewrap() -> tuple[list[str], list[int]]:
  """Options of bubblewrap, and the descriptors that it reads; to be closed."""
  options = ['--uid', str(_ID), '--gid', str(_ID), '--hostname', USER]
  for name in ('USER', 'LOGNAME'):
    options += ['--setenv', name, USER]
  fds = []
  for name, text in _FILES.items():
    fd, writer = os.pipe()
    with open(writer, 'w') as f:
      f.write(text)
    fds.append(fd)
    options += ['--perms', '0644', '--file', str(fd), f'/etc/{name}']
  options += ['--symlink', '/usr/share/zoneinfo/Etc/UTC', '/etc/localtime']
  # Links to programs, such as awk.
  links = '/etc/alternatives'
  return [*options, '--ro-bind-try', links, links], fds
