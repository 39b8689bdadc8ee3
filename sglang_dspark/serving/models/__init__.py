"""Model classes for drafts that SGLang has none for. SGLang imports this package where SGLANG_EXTERNAL_MODEL_PACKAGE
names it, which it does where a draft needs one.
"""
