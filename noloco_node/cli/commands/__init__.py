"""Commands that have a module of their own: what is typed, and who does it. Nothing here loads more than typer needs.

members      `members`
journals     what nodes have written down: `me`, `journal export`
models       what an export is worth: `evaluate`, `generate`
observation  `watch`
"""
