"""Answers in OpenAI's shapes, whole or as chunks of a stream, with the statistics of their rounds as `dspark`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from local_runner.answer import Answer
from local_runner.server.feed import event
from local_runner.server.jobs import Ended, Job, Said
from local_runner.server.refusal import Refused
from sglang_dspark.decoding.rounds import summarise

FINISHED = {"eos": "stop", "stop_string": "stop", "length": "length", "context": "length", "cancelled": "abort"}
"""OpenAI's reasons for each of `rounds.STOPS`; it has none for an answer that was cut off, so that is as elsewhere."""


@dataclass(slots=True)
class Reply:
    """What has been answered of a job so far, and its shapes."""

    job: Job
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    answers: list[Answer] = field(default_factory=list)

    async def whole(self) -> dict[str, Any]:
        """The response, once it is complete."""
        async for what in self.job.events():
            if isinstance(what, Ended):
                self.answers.append(what.answer)
        return {
            **self._head("chat.completion" if self._chat else "text_completion"),
            "choices": [
                self._choice(i, self._content(answer.text or "", whole=True), FINISHED[answer.stop])
                for i, answer in enumerate(self.answers)
            ],
            "usage": self._usage(),
            "dspark": self._statistics(rounds=self.job.ask.events),
        }

    async def chunks(self) -> AsyncIterator[str]:
        """The response as server-sent events, of which the last is `[DONE]`."""
        ask = self.job.ask
        begun: set[int] = set()
        try:
            async for what in self.job.events():
                if self._chat and what.choice not in begun:
                    begun.add(what.choice)
                    yield self._chunk(what.choice, {"delta": {"role": "assistant", "content": ""}})
                if isinstance(what, Said):
                    if what.text or ask.events:
                        about = {"round": asdict(what.round)} if ask.events else None
                        yield self._chunk(what.choice, self._content(what.text), about=about)
                    continue
                self.answers.append(what.answer)
                if what.rest:
                    yield self._chunk(what.choice, self._content(what.rest))
                last = len(self.answers) == ask.choices * len(ask.prompts)
                content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
                about = self._statistics() if last else None
                yield self._chunk(what.choice, content, FINISHED[what.answer.stop], about)
            if ask.include_usage:
                yield event(json.dumps({**self._head(self._of_chunk), "choices": [], "usage": self._usage()}))
        except Refused as refused:
            yield event(json.dumps(refused.body()))
        yield event("[DONE]")

    @property
    def _chat(self) -> bool:
        return self.job.ask.kind == "chat"

    @property
    def _of_chunk(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, what: str) -> dict[str, Any]:
        return {"id": self.job.ask.id, "object": what, "created": self.created, "model": self.model}

    def _chunk(
        self, choice: int, content: dict[str, Any], reason: str | None = None, about: dict[str, Any] | None = None
    ) -> str:
        data = {**self._head(self._of_chunk), "choices": [self._choice(choice, content, reason)]}
        if about is not None:
            data["dspark"] = about
        if self.job.ask.include_usage:
            data["usage"] = None
        return event(json.dumps(data, ensure_ascii=False))

    def _content(self, text: str, *, whole: bool = False) -> dict[str, Any]:
        if not self._chat:
            return {"text": text}
        return {"message": {"role": "assistant", "content": text}} if whole else {"delta": {"content": text}}

    @staticmethod
    def _choice(index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        prompts = sum(a.prompt_tokens for a in self.answers[:: self.job.ask.choices])
        made = sum(len(a.tokens) for a in self.answers)
        return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}

    def _statistics(self, *, rounds: bool = False) -> dict[str, Any]:
        """What was decoded how, and `rounds.summarise` of it; with `rounds` these too."""
        ask = self.job.ask
        every = [r for answer in self.answers for r in answer.rounds]
        return {
            "mode": ask.mode,
            "schedule": None if ask.mode == "plain" else str(ask.decoding.schedule or "fixed"),
            "stop": [answer.stop for answer in self.answers],
            **({"cut_short": self.job.cut_short} if self.job.cut_short else {}),
            "queued_s": self.job.queued_s,
            "summary": asdict(summarise(every)),
            **({"rounds": [asdict(r) for r in every]} if rounds else {}),
        }
