"""Every method of both papers, and this project's own, in one harness: the same model, text, tokens and inner steps."""
