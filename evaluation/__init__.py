"""Downstream evaluation of looped language models through lm-evaluation-harness."""
