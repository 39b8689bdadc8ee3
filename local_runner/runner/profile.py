"""What rounds cost on this machine, remembered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from local_runner.files import whole_file
from sglang_dspark.decoding.adaptive import Costs
from sglang_dspark.decoding.schedule import CostCurve
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

FORMAT = "dspark-profile 1"


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of rounds, their overhead included: plain, parked (see `Costs`), and those that verify 1..γ+1 rows after
    a draft.

    `overhead_s` is what a plain round takes beside the target's forward. Of position k, `tried[k]` drafts were verified
    once those before them survived, and `survived[k]` of them did.
    """

    plain_s: float
    parked_s: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_s: float
    overhead_s: float
    tried: tuple[int, ...]
    survived: tuple[int, ...]

    @property
    def curve(self) -> CostCurve:
        """Seconds against rows. Raises InputError for what is no curve."""
        return CostCurve(self.rows, self.seconds, self.draft_s)

    def costs(self) -> Costs:
        """What a policy asks. Raises InputError for what no round can cost."""
        return Costs(self.plain_s, self.parked_s, self.curve)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """The inverse of `to_dict`. Raises InputError, KeyError, TypeError or ValueError for anything else."""
        profile = cls(
            plain_s=float(data["plain_s"]),
            parked_s=float(data["parked_s"]),
            rows=tuple(map(int, data["rows"])),
            seconds=tuple(map(float, data["seconds"])),
            draft_s=float(data["draft_s"]),
            overhead_s=float(data["overhead_s"]),
            tried=tuple(map(int, data["tried"])),
            survived=tuple(map(int, data["survived"])),
        )
        profile.costs()
        return profile


def remembered(key: dict[str, Any], measured: Callable[[], Profile]) -> tuple[Profile, str | None]:
    """The profile stored under `key`, or else a `measured` one, which is stored; and why it could not be, if so.

    A file that is broken, of another version or of another key counts as none.
    """
    if (known := stored(key)) is not None:
        return known, None
    profile = measured()
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as stream:
            json.dump({"format": FORMAT, "key": key, "profile": profile.to_dict()}, stream, indent=1)
    except (InputError, OSError) as error:
        return profile, f"What rounds cost here could not be stored and will be measured again: {error}"
    return profile, None


def stored(key: dict[str, Any]) -> Profile | None:
    """The profile stored under `key`, if there is a sound one."""
    try:
        data = json.loads(_file(key).read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["key"] != json.loads(json.dumps(key)):
            return None
        return Profile.from_dict(data["profile"])
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None


def _file(key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return store_root() / "runner" / f"{name}.json"
