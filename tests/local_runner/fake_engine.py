"""A scripted engine with the interface of a real one; run as a program it is `dspark` on that engine.

Answers walk through TEXT, starting at a place that the prompt chooses. The draft proposes the next four tokens, right
except at every seventh place. Keyword arguments plant what a test wants to see found.
"""

import argparse
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError

TEXT = [
    *"The lamp turns slowly and the sea below keeps its own time .".replace(" ", "| ").split("|"),
    *["\ndef beam(angle):\n", "    return angle % 360\n", "# naïve", " 🌊", " but", " bright", " [bold]"],
]
WRONG = len(TEXT)
BLOCK = 4


class Stream:
    """Joins the pieces of tokens."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(("·wrong" if t == WRONG else TEXT[t % len(TEXT)]) for t in tokens)


class FakeEngine:
    """`flip` is a position at which DSpark commits a wrong token; `cut` one after which it stops too early."""

    def __init__(
        self,
        *,
        flip: int | None = None,
        cut: int | None = None,
        margin: float = 0.5,
        noise: float = 0.1,
        best: tuple[int, int] | None = None,
        block: int = BLOCK,
        tokenizer: object = "a tokenizer",
        plain_s: float = 0.02,
        dspark_s: float = 0.03,
        sleep_s: float = 0.0,
        context: int = 4096,
        stops: Sequence[str] = (),
    ) -> None:
        self.flip, self.cut, self._margin, self._noise, self.best = flip, cut, margin, noise, best
        self.block, self.tokenizer, self.context = block, tokenizer, context
        self.plain_s, self.dspark_s, self.sleep_s = plain_s, dspark_s, sleep_s
        self.stop_ids = frozenset({999})
        self.notes: list[str] = []
        self.has_confidence = self.adapts = self.reuse_prefix = False
        self.description: dict[str, Any] = {
            "engine": "fake",
            "device": "cpu",
            "dtype": "float32",
            "threads": 2,
            "versions": {"fake": "1"},
            "target": "fake-target",
            "draft": "fake-draft" if block else None,
        }
        self.requests: list[Any] = []
        self.conversations: list[list[dict[str, str]]] = []

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.conversations.append(list(messages))
        return [len(m["content"]) for m in messages]

    def decode(self, ids: Sequence[int]) -> str:
        return Stream().push(ids)

    def text_stream(self) -> Stream:
        return Stream()

    def margin(self, prompt_ids: Sequence[int], output_prefix_ids: Sequence[int]) -> tuple[int, int, float]:
        right = self._token(prompt_ids, len(output_prefix_ids))
        return (*(self.best or (right, WRONG)), self._margin)

    def width_noise(self, ids: Sequence[int]) -> float:
        return self._noise

    def generate(self, request: Any, cancelled: threading.Event | None = None) -> Iterator[Round]:
        if len(request.prompt_ids) >= self.context:
            raise InputError("The prompt has more tokens than the context; shorten it.")
        self.requests.append(request)
        mode = "plain" if request.schedule is None else "dspark"
        made, index, end = 0, 0, request.max_new_tokens
        if mode == "dspark" and self.cut is not None:
            end = min(end, self.cut)
        text = ""
        stop = None
        while stop is None and not (cancelled is not None and cancelled.is_set()):
            time.sleep(self.sleep_s)
            right = [self._token(request.prompt_ids, made + i) for i in range(BLOCK + 1)]
            if mode == "dspark" and self.flip is not None:
                right = [WRONG if made + i == self.flip else t for i, t in enumerate(right)]
            drafted = (
                []
                if mode == "plain" or index == 0
                else [WRONG if (made + i) % 7 == 3 else t for i, t in enumerate(right[:-1])]
            )
            scheduled = request.schedule.length([0.9] * BLOCK, BLOCK) if drafted else 0
            accepted = next((i for i in range(scheduled) if drafted[i] != right[i]), scheduled)
            committed = (*drafted[:accepted], right[accepted])[: end - made]
            made += len(committed)
            text += Stream().push(committed)
            stop = "eos" if made == self.cut and mode == "dspark" else "length" if made == end else None
            stop = "stop_string" if any(s in text for s in request.stop_strings) else stop
            yield Round(
                request=request.name,
                index=index,
                position=len(request.prompt_ids) + made - 1,
                anchor=0,
                drafted=tuple(drafted),
                confidence=(0.9,) * len(drafted),
                scheduled=scheduled,
                accepted=accepted,
                next_token=right[accepted],
                committed=tuple(committed),
                stop=stop,
                draft_s=0.001 if drafted else 0.0,
                verify_s=self.plain_s if mode == "plain" else self.dspark_s,
            )
            index += 1

    def _token(self, prompt_ids: Sequence[int], position: int) -> int:
        return (sum(prompt_ids) + position) % len(TEXT)


def install(engine: FakeEngine, patch: Any = None) -> None:
    """Make `dspark` use `engine` whatever models it is asked for; `patch` is a MonkeyPatch that takes it back."""
    from local_runner import options

    module = types.ModuleType("local_runner.runner")
    for function in ("open_runner", "load_way"):
        module.__dict__[function] = lambda *args, **kwargs: engine
    module.__dict__["Models"] = lambda *given: types.SimpleNamespace(block=given[2])
    module.__dict__["Way"] = lambda *given: types.SimpleNamespace(
        dtype=given[1], compile=given[2], threads=given[3], device=given[4]
    )
    if patch is None:
        sys.modules[module.__name__] = module
    else:
        patch.setitem(sys.modules, module.__name__, module)
    set_ = setattr if patch is None else patch.setattr
    set_(options, "_paths", lambda settings: (Path("target"), Path("draft"), settings.pair or "fake-pair"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sleep-s", type=float, default=0.0)
    ours, theirs = parser.parse_known_args()
    install(FakeEngine(sleep_s=ours.sleep_s))
    from local_runner.cli import app

    app(theirs, prog_name="dspark")
