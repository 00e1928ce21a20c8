"""A full disk is said in one line, whichever thread notices it."""

from __future__ import annotations

from collections.abc import Iterator
import errno
import logging
import re
import sys
import threading

_FULL = (errno.ENOSPC, errno.EDQUOT)
# TensorStore's errors are text only.
_CODE = re.compile(r"os_error_code='(\d+)'")
_PATH = re.compile(r'"(/[^"]+)"')


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """An error, what it was raised from or meanwhile, and so on."""
  seen = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    yield error
    error = error.__cause__ or error.__context__


def full(error: BaseException | None) -> str | None:
  """What to tell people if an error comes from a full disk; else None."""
  for e in _chain(error):
    if isinstance(e, OSError) and e.errno in _FULL:
      return _message(str(e.filename or ''))
    code = _CODE.search(str(e))
    if code and int(code[1]) in _FULL:
      path = _PATH.search(str(e))
      return _message(path[1] if path else '')
  return None


def _message(path: str) -> str:
  where = f' of {path}' if path else ''
  return f'the disk{where} is full; free some space, then run it again'


class _Quiet(logging.Filter):
  """Drops tracebacks of a full disk: the process ends with a line about it."""

  def filter(self, record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return full(error) is None


def quiet_threads() -> None:
  """Keeps a full disk's tracebacks in threads from the terminal."""
  for name in (None, 'absl', 'asyncio'):
    logging.getLogger(name).addFilter(_Quiet())
  in_threads, unraisable = threading.excepthook, sys.unraisablehook

  def hook(args):
    if full(args.exc_value) is None:
      in_threads(args)

  def late(args):
    # A write that fails ends its event loop; TensorStore's threads report the
    # others to it all the same.
    if args.object is not None or str(args.exc_value) != 'Event loop is closed':
      unraisable(args)

  threading.excepthook = hook
  sys.unraisablehook = late
