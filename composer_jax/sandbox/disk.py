"""File operations inside a sandbox; everything here may meet hostile files.

Standard library only: the sandbox gets this file as source text.
"""

import base64
import io
import json
import os
import stat


def _open_dir(path, create=False):
  """Directory descriptor of a relative path; no link is ever followed."""
  fd = os.open('.', os.O_RDONLY | os.O_DIRECTORY)
  for part in [p for p in path.split('/') if p]:
    if part == '..':
      raise PermissionError(f'{path}: .. is not allowed')
    if create:
      try:
        os.mkdir(part, dir_fd=fd)
      except FileExistsError:
        pass
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    inner = os.open(part, flags, dir_fd=fd)
    os.close(fd)
    fd = inner
  return fd


def put(files):
  for path, content in files.items():
    folder, name = os.path.split(path)
    at = _open_dir(folder, create=True)
    try:
      os.unlink(name, dir_fd=at)
    except FileNotFoundError:
      pass
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(name, flags, 0o644, dir_fd=at), 'wb') as f:
      f.write(base64.b64decode(content))
    os.close(at)


def get(paths, limit, out):
  files = {}
  for path in paths:
    folder, name = os.path.split(path)
    try:
      at = _open_dir(folder)
      flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
      with open(os.open(name, flags, dir_fd=at), 'rb') as f:
        if stat.S_ISREG(os.fstat(f.fileno()).st_mode):
          content = f.read(limit + 1)
          if len(content) <= limit:
            files[path] = base64.b64encode(content).decode()
      os.close(at)
    except (OSError, ValueError):
      continue  # missing, a link, a device, no name: the same as not there
  out.write(json.dumps(files).encode())


def snapshot(out):
  """Writes files, directories and links as they are; no link is followed."""
  import tarfile  # slow to import, and few sandboxes need it

  with tarfile.open(fileobj=out, mode='w|') as tar:
    tar.add('.', filter=lambda m: None if m.isdev() else m)


def restore(content):
  """Unpacks what `snapshot` wrote."""
  import tarfile

  data = io.BytesIO(base64.b64decode(content))
  with tarfile.open(fileobj=data) as tar:
    tar.extraction_filter = lambda member, _: member  # links, too, stay
    tar.extractall()


def _empty(path):
  """Removes all of a directory; depth, modes and links are hostile.

  Directories are hoisted to the top before they are emptied, so two
  descriptors do for any depth.
  """
  top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  serial = 0
  while names := os.listdir(top):
    for name in names:
      if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
        os.unlink(name, dir_fd=top)
        continue
      os.chmod(name, 0o700, dir_fd=top)
      inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=top)
      for entry in list(os.scandir(inner)):
        if entry.is_dir(follow_symlinks=False):
          serial += 1
          os.chmod(entry.name, 0o700, dir_fd=inner)  # moving needs it
          hoisted = f'hoisted-{os.getpid()}-{serial}'
          os.rename(entry.name, hoisted, src_dir_fd=inner, dst_dir_fd=top)
        else:
          os.unlink(entry.name, dir_fd=inner)
      os.close(inner)
      os.rmdir(name, dir_fd=top)
  os.close(top)


def reset(dirs):
  for path in dirs:
    os.chmod(path, 0o700)
    _empty(path)
