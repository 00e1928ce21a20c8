"""Answers of the API that are errors."""

from __future__ import annotations

_TYPES = {
    400: 'invalid_request_error',
    401: 'authentication_error',
    403: 'permission_error',
    404: 'not_found_error',
    429: 'rate_limit_error',
}


class ApiError(Exception):
  """An answer other than 200; the message is for people, in one line."""

  def __init__(
      self,
      status: int,
      message: str,
      *,
      param: str | None = None,
      code: str | None = None,
      retry_after: int | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.retry_after = retry_after
    kind = _TYPES.get(status)
    if kind is None:
      kind = 'server_error' if status >= 500 else 'invalid_request_error'
    error = {'message': message, 'type': kind, 'param': param, 'code': code}
    self.body = {'error': error}
