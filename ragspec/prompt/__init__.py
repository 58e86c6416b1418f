"""The prompt: a Jinja template, the target's chat template, and what fits the window."""

from ragspec.prompt.builder import Prompt, PromptBuilder

__all__ = ["Prompt", "PromptBuilder"]
