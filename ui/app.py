"""The page as a web application: Gradio's controls around the view, and our own routes under /dspark/.

Gradio's events run in the browser and call `dspark` of `page/page.js` with the values of the controls; no token ever
passes through Gradio.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any, Literal, get_args

# Before Gradio is imported: it asks for its version and counts its users otherwise.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import gradio as gr
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from local_runner.engine import Dtype, Kind
from local_runner.options import Settings
from local_runner.pairs import DEFAULT_PAIR, pair_files
from local_runner.prompts import read_prompts
from ui.ask import MOST_TOKENS, SCHEDULES
from ui.guard import Guard
from ui.routes import routes
from ui.service import Service
from ui.theme import theme
from ui.words import words

WORDS = words("en")
HEAD = "".join(
    [f'<link rel="stylesheet" href="dspark/assets/{name}.css">' for name in ("view", "page")]
    + [f'<script src="dspark/assets/{name}.js"></script>' for name in ("view", "page")]
)
ENGINES: dict[Kind, str] = {"torch": "torch", "gguf": "llama_cpp"}
LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]


def application(
    service: Service,
    base: Settings,
    *,
    replay: str | None = None,
    remote: bool = False,
    auth: str | None = None,
    local: bool = True,
) -> FastAPI:
    """The web application on `service`. `replay` is the id of the one run to show, `auth` is USER:PASSWORD.

    With `remote`, there are no controls for what another server has decided.

    With `local`, only requests that name this machine's loopback are answered, so that no other page can reach it
    through a name of its own.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(routes(service, base))
    gr.mount_gradio_app(
        app,
        page(base, replay, remote=remote),
        path="/",
        head=HEAD,
        theme=theme(),
        ssr_mode=False,
        pwa=False,
        footer_links=[],
        run_history=False,
        show_error=False,
    )
    app.add_middleware(Guard, auth=auth)
    if local:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK, www_redirect=False)
    return app


def page(base: Settings, replay: str | None = None, *, remote: bool = False) -> gr.Blocks:
    """Gradio's part: tabs and controls; with `replay`, only the view of that run."""
    labels: list[tuple[Any, dict[str, str]]] = []

    def named(component: Any, **names: str) -> Any:
        """`component`, whose properties are texts by these names in the page's language."""
        labels.append((component, names))
        return component

    blocks: gr.Blocks
    with gr.Blocks(title="DSpark", analytics_enabled=False, fill_width=True) as blocks:
        with gr.Row(elem_id="dspark-top"):
            gr.HTML('<h1>DSpark</h1><p><dspark-words data-word="subtitle"></dspark-words></p>', js_on_load=None)
            language = named(
                gr.Radio(
                    [("English", "en"), ("한국어", "ko")],
                    value="en",
                    label=WORDS["language"],
                    scale=0,
                    min_width=200,
                    elem_id="dspark-language",
                ),
                label="language",
                value="",
            )
        if replay:
            gr.HTML(f'<dspark-race data-run="{replay}"></dspark-race>', js_on_load=None)
        else:
            _tabs(base, named, remote)
        specification = json.dumps([names for _, names in labels])
        components = [component for component, _ in labels]
        blocks.load(None, None, components, js=f"() => dspark.labels({specification})", api_visibility="private")
        language.input(
            None, language, components, js=f"(code) => dspark.labels({specification}, code)", api_visibility="private"
        )
    return blocks


def _tabs(base: Settings, named: Any, remote: bool) -> None:
    with named(gr.Accordion(WORDS["settings"], open=False, elem_id="dspark-settings"), label="settings"):
        settings = _settings(base, named, remote)
    with gr.Tabs():
        with named(gr.Tab(WORDS["race"], id="race"), label="race"):
            with gr.Row(equal_height=True, elem_classes="dspark-ask"):
                with gr.Column(scale=3, min_width=280):
                    prompt = named(
                        gr.Textbox(label=WORDS["prompt"], placeholder=WORDS["prompt_hint"], lines=3, max_lines=8),
                        label="prompt",
                        placeholder="prompt_hint",
                    )
                with gr.Column(scale=2, min_width=280):
                    examples = named(
                        gr.Dropdown(_examples(), value=None, label=WORDS["examples"], filterable=False),
                        label="examples",
                    )
                    with gr.Row(elem_classes="dspark-buttons"):
                        start = named(_button("start", "race-start", "primary"), value="start")
                        stop = named(_button("stop", "race-stop", interactive=False), value="stop")
                        reset = named(_button("reset", "race-reset"), value="reset")
            gr.HTML("<dspark-race></dspark-race>", js_on_load=None)
        with named(gr.Tab(WORDS["chat"], id="chat"), label="chat"):
            gr.HTML("<dspark-chat></dspark-chat>", js_on_load=None)
            with gr.Row(equal_height=True, elem_classes="dspark-ask"):
                with gr.Column(scale=3, min_width=280):
                    message = named(
                        gr.Textbox(label=WORDS["message"], placeholder=WORDS["message_hint"], lines=3, max_lines=8),
                        label="message",
                        placeholder="message_hint",
                    )
                with gr.Column(scale=2, min_width=280):
                    system = named(gr.Textbox(label=WORDS["instructions"], lines=1, max_lines=4), label="instructions")
                    plain = named(gr.Checkbox(False, label=WORDS["plain"], container=False), label="plain")
                    with gr.Row(elem_classes="dspark-buttons"):
                        send = named(_button("send", "chat-send", "primary"), value="send")
                        halt = named(_button("stop", "chat-stop", interactive=False), value="stop")
                        anew = named(_button("anew", "chat-reset"), value="anew")
        with named(gr.Tab(WORDS["machine"], id="machine"), label="machine"):
            gr.HTML("<dspark-machine></dspark-machine>", js_on_load=None)
            with gr.Row(elem_classes="dspark-buttons"):
                measure = named(_button("measure", "machine-measure", "primary"), value="measure")

    def browser(event: Any, call: str, inputs: list[Any], outputs: list[Any]) -> None:
        event(None, inputs, outputs, js=f"(...values) => {call}", queue=False, api_visibility="private")

    browser(examples.input, "values[0]", [examples], [prompt])
    browser(start.click, "void dspark.start(...values)", [prompt, *settings], [])
    browser(stop.click, "void dspark.stop()", [], [])
    browser(reset.click, "void dspark.reset()", [], [])
    browser(send.click, "dspark.send(...values)", [message, *settings, system, plain], [message])
    browser(halt.click, "void dspark.stopChat()", [], [])
    browser(anew.click, "void dspark.anew()", [], [])
    browser(measure.click, "void dspark.measure(...values)", settings, [])


def _button(
    word: str, id_: str, variant: Literal["primary", "secondary"] = "secondary", *, interactive: bool = True
) -> gr.Button:
    return gr.Button(WORDS[word], elem_id=id_, variant=variant, size="md", min_width=96, interactive=interactive)


def _settings(base: Settings, named: Any, remote: bool) -> list[Any]:
    """The controls for what `page.js` calls FIELDS, in its order."""

    def choice(name: str, choices: list[str], value: str) -> Any:
        return named(
            gr.Dropdown(choices, value=value, label=WORDS[name], interactive=len(choices) > 1, filterable=False),
            label=name,
        )

    def slider(name: str, low: float, high: float, value: float, step: float) -> Any:
        return named(gr.Slider(low, high, value, step=step, label=WORDS[name]), label=name)

    pair = base.target or base.pair or DEFAULT_PAIR
    pairs = [pair] if base.target else list(pair_files())
    schedules = ["auto", *SCHEDULES]
    if base.schedule and base.schedule not in schedules:
        schedules.append(base.schedule)
    with gr.Row():
        temperature = slider("temperature", 0, 2, base.temperature, 0.05)
        top_p = slider("top_p", 0.05, 1, base.top_p, 0.05)
        tokens = slider("max_new_tokens", 2, min(MOST_TOKENS, 2048), base.max_new_tokens, 1)
        seed = named(gr.Textbox("" if base.seed is None else str(base.seed), label=WORDS["seed"]), label="seed")
    with gr.Row(visible=not remote):
        shown = choice("pair", pairs, pair)
        engine = choice("engine", ["auto", *_engines(base)], base.engine or "auto")
        dtype = choice("dtype", list(get_args(Dtype)), base.dtype)
        block = slider("block", 0, 16, base.block or 0, 1)
        schedule = choice("schedule", schedules, base.schedule or "auto")
    return [temperature, top_p, tokens, seed, shown, engine, dtype, block, schedule]


def _engines(base: Settings) -> list[str]:
    """The engines whose libraries are installed, and the one that the program was started with."""
    return [kind for kind, library in ENGINES.items() if kind == base.engine or find_spec(library)]


def _examples() -> list[tuple[str, str]]:
    """The built-in prompts by domain, each as its label and itself."""
    return [
        (f"{prompt.domain}: {prompt.turns[0].splitlines()[0][:90]}", prompt.turns[0])
        for prompt in sorted(read_prompts(), key=lambda p: p.domain)
    ]
