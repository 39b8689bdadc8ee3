"""A repository on a model hub as a place of checkpoints: names from one request, headers by byte ranges, no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from huggingface_hub import HfApi, get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from sglang_dspark.errors import InputError

TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a repository at a commit."""

    repo: str
    commit: str
    file_name: str
    size: int

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.repo}/{self.file_name}"

    def read(self, start: int, count: int) -> bytes:
        """See `Source.read`. Never takes more than was asked for, whatever the server sends."""
        if count == 0:
            return b""
        headers = {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        url = hf_hub_url(self.repo, self.file_name, revision=self.commit)
        data = bytearray()
        with (
            _errors(self.name),
            get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as reply,
        ):
            reply.raise_for_status()
            whole = reply.status_code != 206
            if whole and start:
                raise InputError(f"The hub does not serve parts of {self.name}; fetch the repository first.")
            for piece in reply.iter_bytes():
                data += piece
                if len(data) >= count:
                    break
        if len(data) < count:
            raise InputError(f"The hub sent {len(data)} of {count} bytes of {self.name}; try again.")
        return bytes(data[:count])


@dataclass(slots=True)
class HubRepo:
    """A repository at a revision, which is fixed to a commit by the first request."""

    repo: str
    revision: str = "main"
    _commit: str = ""
    _sizes: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The repository, and its commit once that is known."""
        return f"{self.repo}@{self._commit}" if self._commit else self.repo

    def files(self) -> list[str]:
        """See `Place.files`."""
        if not self._commit:
            with _errors(self.repo):
                info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
            if not info.sha:
                raise InputError(f"The hub names no commit for {self.repo}@{self.revision}; check HF_ENDPOINT.")
            self._sizes = {s.rfilename: s.size for s in info.siblings or [] if s.size is not None}
            self._commit = info.sha
        return sorted(name for name in self._sizes if "/" not in name)

    def source(self, name: str) -> HubSource:
        """See `Place.source`."""
        if name not in self.files():
            raise InputError(f"There is no {name} in {self.repo}; give the id of a complete checkpoint.")
        return HubSource(self.repo, self._commit, name, self._sizes[name])


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"'{what}' cannot be a hub id; write owner/name as on its page.") from error
    except (HfHubHTTPError, httpx.HTTPStatusError) as error:
        raise InputError(
            f"The hub refused {what} (HTTP {error.response.status_code}); check the id, or log in if it is private."
        ) from error
    except (httpx.HTTPError, ConnectionError) as error:
        raise InputError(
            f"The hub cannot be reached for {what} ({type(error).__name__}); check the network, HF_ENDPOINT and"
            " HF_HUB_OFFLINE, or pass a local folder instead."
        ) from error
