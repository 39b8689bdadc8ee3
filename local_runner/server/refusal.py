"""What a client is told when its request cannot be answered."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A request that is not answered: an HTTP `status`, one sentence, and the parameter that it is about."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": str(self),
                "type": "server_error" if self.status >= 500 else kind,
                "param": self.param,
                "code": self.code,
            }
        }
