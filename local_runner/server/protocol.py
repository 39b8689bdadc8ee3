"""OpenAI's requests as this server understands them.

Every parameter is honoured or refused by its name. What the request leaves out is as the command line of `serve` says.
Beyond OpenAI's parameters there are `top_k`, `min_p` and `repetition_penalty` as elsewhere, `rid`, an id for the
request that the client chooses, and `dspark`, an object with `mode` (`plain` or `dspark`), `schedule` (as `--schedule`)
and `events`, which asks for the Rounds.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from local_runner.engine import Decoding, Engine, Message, Mode
from local_runner.server.refusal import Refused
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Schedule, parse_schedule
from sglang_dspark.errors import InputError

Kind = Literal["chat", "text"]
Prompt = tuple[Message, ...] | str | tuple[int, ...]
"""A conversation, a text to continue, or token ids."""
T = TypeVar("T")

MOST_CHOICES = 16
"""Answers that one request may ask for: its prompts times `n`."""
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"
)  # fmt: skip
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Parameters that say nothing about the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that ask for nothing, of parameters that are refused otherwise."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that was understood: `choices` answers to each of `prompts`, decoded as `decoding` says."""

    id: str
    kind: Kind
    prompts: tuple[Prompt, ...]
    decoding: Decoding
    mode: Mode
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    events: bool = False

    @property
    def prompt_param(self) -> str:
        """What the prompt is called in the request."""
        return "messages" if self.kind == "chat" else "prompt"

    def seeded(self, choice: int) -> Decoding:
        """How to decode a prompt's `choice`-th answer: the seed, if there is one, counts on from answer to answer."""
        sampling = self.decoding.sampling
        if sampling.greedy:
            return self.decoding
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + choice + 2**63) % 2**64 - 2**63)
        return replace(self.decoding, sampling=sampling.with_seed())


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: an engine under a name, and how requests are decoded that do not say."""

    engine: Engine
    name: str
    decoding: Decoding
    mode: Mode


class Fields:
    """The fields of a JSON object, taken one by one; null is as if a field were absent."""

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            raise Refused(f"{path or 'The request'} must be a JSON object.", path or None)
        self._left = {name: value for name, value in data.items() if value is not None}
        self._path = f"{path}." if path else ""

    def take(self, name: str, kind: type[T], default: T) -> T:
        """The field `name`, of type `kind`, or `default`."""
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = {bool: "true or false", int: "a whole number", str: "a text", dict: "an object", list: "a list"}
            raise Refused(f"{self._path}{name} must be {wanted[kind]}.", self._path + name)
        return text(value, self._path + name) if isinstance(value, str) else value  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        """Whether there is a field `name` that nobody took."""
        return name in self._left

    def any(self, name: str) -> Any:
        """The field `name`, whatever it is, or None."""
        return self._left.pop(name, None)

    def finish(self) -> None:
        """Refuse what nobody took, unless it asks for nothing."""
        for name, value in self._left.items():
            neutral = any(value == v and type(value) is type(v) for v in NEUTRAL.get(name, ()))
            if not neutral and (self._path or name not in HARMLESS):
                said = "this value of the parameter" if name in NEUTRAL else "the parameter"
                raise Refused(
                    f"This server does not support {said} '{self._path}{name}'; leave it out.",
                    self._path + name,
                    code="unsupported_parameter",
                )


def text(value: Any, path: str) -> str:
    """`value` if it is a text of whole characters."""
    if not isinstance(value, str):
        raise Refused(f"{path} must be a text.", path)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"{path} holds half of a character; send whole ones.", path) from None
    return value


def read_ask(body: Any, kind: Kind, served: Served) -> Ask:
    """The request in the JSON value `body`. Raises Refused that names what cannot be honoured."""
    fields = Fields(body)
    model = fields.take("model", str, served.name)
    if model not in (served.name, "default"):
        message = f"There is no model '{model}' here; this server has '{served.name}'."
        raise Refused(message, "model", status=404, code="model_not_found")
    prompts = _conversation(fields) if kind == "chat" else _prompts(fields)
    mode, schedule, events = _dspark(fields, served)
    decoding = replace(
        served.decoding,
        max_new_tokens=_longest(fields, served),
        sampling=_sampling(fields, served),
        stop_strings=_stops(fields, served),
        schedule=schedule or served.decoding.schedule,
    )
    stream = fields.take("stream", bool, False)
    options = Fields(fields.take("stream_options", dict, {}), "stream_options")
    include_usage = options.take("include_usage", bool, False)
    options.take("include_obfuscation", bool, False)
    options.finish()
    choices = fields.take("n", int, 1)
    if not 1 <= choices <= MOST_CHOICES // len(prompts):
        raise Refused(f"n must be at least 1, and a request may ask for {MOST_CHOICES} answers in all.", "n")
    rid = fields.take("rid", str, "")
    if rid and not ID.fullmatch(rid):
        raise Refused("rid must be up to 100 letters, digits and marks of '._:-'.", "rid")
    fields.finish()
    name = rid or f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
    return Ask(name, kind, prompts, decoding, mode, choices, stream, include_usage, events)


def _conversation(fields: Fields) -> tuple[Prompt, ...]:
    given = fields.take("messages", list, [])
    if not given:
        raise Refused("messages must hold at least one message.", "messages")
    return (tuple(_message(Fields(m, f"messages[{i}]"), f"messages[{i}]") for i, m in enumerate(given)),)


def _message(fields: Fields, path: str) -> Message:
    role = fields.take("role", str, "")
    if role not in ROLES:
        raise Refused(f"{path}.role must be one of {', '.join(ROLES)}.", f"{path}.role")
    content = fields.any("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    for name in ("tool_calls", "annotations"):  # what clients send along with an answer of ours
        if fields.any(name) not in (None, []):
            raise Refused(f"{path}.{name} is not supported, only text is.", f"{path}.{name}")
    fields.finish()
    return {"role": ROLES[role], "content": text(content, f"{path}.content")}


def _part(part: Any, path: str) -> str:
    fields = Fields(part, path)
    if (kind := fields.take("type", str, "")) != "text":
        raise Refused(f"{path} has the type '{kind}', and only 'text' is supported.", f"{path}.type")
    content = text(fields.any("text"), f"{path}.text")
    fields.finish()
    return content


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    given = fields.any("prompt")
    many = given if isinstance(given, list) and given and not _are_ids(given) else [given]
    if len(many) > MOST_CHOICES:
        raise Refused(f"prompt holds {len(many)} prompts, and {MOST_CHOICES} are the most.", "prompt")
    prompts: list[Prompt] = []
    for prompt in many:
        if isinstance(prompt, list) and prompt and _are_ids(prompt):
            prompts.append(tuple(prompt))
        elif isinstance(prompt, str):
            prompts.append(text(prompt, "prompt"))
        else:
            raise Refused("prompt must be a text, a list of token ids, or a list of such prompts.", "prompt")
    return tuple(prompts)


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def _dspark(fields: Fields, served: Served) -> tuple[Mode, Schedule | None, bool]:
    asked = Fields(fields.take("dspark", dict, {}), "dspark")
    mode = asked.take("mode", str, served.mode)
    name = asked.take("schedule", str, "")
    events = asked.take("events", bool, False)
    asked.finish()
    if mode not in ("plain", "dspark"):
        raise Refused("dspark.mode must be 'plain' or 'dspark'.", "dspark.mode")
    if mode == "dspark" and not served.engine.block:
        raise Refused("dspark.mode is 'dspark', and this server has no draft; serve a pair.", "dspark.mode")
    if not name:
        return ("plain" if mode == "plain" else "dspark"), None, events
    if mode == "plain":
        raise Refused("dspark.schedule is for drafts, and plain decoding has none.", "dspark.schedule")
    try:
        schedule = parse_schedule(name)
    except InputError as error:
        raise Refused(str(error), "dspark.schedule") from error
    if schedule.uses_confidence and not served.engine.has_confidence:
        raise Refused(f"dspark.schedule '{name}' needs a draft with a confidence head; use 'fixed'.", "dspark.schedule")
    return "dspark", schedule, events


def _longest(fields: Fields, served: Served) -> int:
    longest = {n: fields.take(n, int, 0) for n in ("max_tokens", "max_completion_tokens") if fields.has(n)}
    for name, value in longest.items():
        if value < 1:
            raise Refused(f"{name} must be at least 1.", name)
    if len(set(longest.values())) > 1:
        raise Refused("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    return next(iter(longest.values()), served.decoding.max_new_tokens)


def _sampling(fields: Fields, served: Served) -> SamplingParams:
    """Each parameter by itself first, so that the one that cannot be is named."""
    given = {name: value for name in SAMPLING if (value := fields.any(name)) is not None}
    bias = fields.take("logit_bias", dict, {})
    if bias:
        try:
            given["logit_bias"] = {int(token): value for token, value in bias.items()}
        except ValueError:
            raise Refused("logit_bias must map token ids to numbers.", "logit_bias") from None
    for name, value in given.items():
        try:
            SamplingParams(**{name: value})
        except InputError as error:
            raise Refused(str(error), name) from error
        except OverflowError:
            raise Refused(f"{name} is too large a number.", name) from None
    return replace(served.decoding.sampling, **given)


def _stops(fields: Fields, served: Served) -> tuple[str, ...]:
    given = fields.any("stop")
    if given is None:
        return served.decoding.stop_strings
    stops = tuple(text(s, "stop") for s in (given if isinstance(given, list) else [given]))
    if not all(stops):
        raise Refused("stop holds an empty text.", "stop")
    return stops
