"""How Gradio's controls look: the colours of the view, and fonts that are there already."""

from __future__ import annotations

import gradio as gr

SYSTEM_FONTS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Noto Sans", "sans-serif"]
SYSTEM_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Noto Sans Mono", "monospace"]


def theme() -> gr.themes.Base:
    """The view's colours (see `view/view.css`) for Gradio's controls, and fonts that are there already."""
    base = gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        font=SYSTEM_FONTS,
        font_mono=SYSTEM_MONO,
    )
    light_and_dark = {
        "body_background_fill": ("#f6f7f9", "#0e1217"),
        "background_fill_primary": ("#ffffff", "#161b22"),
        "background_fill_secondary": ("#f3f5f8", "#0f141a"),
        "block_background_fill": ("#ffffff", "#161b22"),
        "block_border_color": ("#dfe4ea", "#2a323d"),
        "border_color_primary": ("#dfe4ea", "#2a323d"),
        "body_text_color": ("#18202b", "#e7ecf3"),
        "body_text_color_subdued": ("#566171", "#9dabbc"),
        "block_label_text_color": ("#566171", "#9dabbc"),
        "block_title_text_color": ("#566171", "#9dabbc"),
        "block_info_text_color": ("#566171", "#9dabbc"),
        "input_background_fill": ("#ffffff", "#0f141a"),
        "input_border_color": ("#c9d1da", "#3a4452"),
        "input_placeholder_color": ("#566171", "#9dabbc"),
        "button_primary_background_fill": ("#0a7068", "#0a7068"),
        "button_primary_background_fill_hover": ("#085a54", "#0c7a70"),
        "button_primary_text_color": ("#ffffff", "#ffffff"),
        "button_secondary_background_fill": ("#ffffff", "#1f2630"),
        "button_secondary_background_fill_hover": ("#e9edf1", "#2a323d"),
        "button_secondary_border_color": ("#7d8896", "#6f7d8e"),
        "button_secondary_text_color": ("#18202b", "#e7ecf3"),
        "checkbox_label_background_fill": ("#ffffff", "#161b22"),
        "checkbox_label_background_fill_selected": ("#e0f2ef", "#15332f"),
        "checkbox_background_color_selected": ("#0a7068", "#0a7068"),
        "slider_color": ("#0a7068", "#4fd0c0"),
        "link_text_color": ("#0a7068", "#4fd0c0"),
    }
    variables = {name: light for name, (light, _) in light_and_dark.items()}
    dark = {f"{name}_dark": shade for name, (_, shade) in light_and_dark.items()}
    return base.set(
        **variables,
        **dark,
        block_radius="12px",
        container_radius="12px",
        input_radius="8px",
        button_medium_radius="8px",
        color_accent="#0a7068",
        button_border_width="1px",
        input_border_width="1px",
        button_transition="none",
    )
