"""Prompt-cache failures that others met in public, each as the behaviour that prevents it; one file per kind.

The mark in brackets at the end of a docstring names the case.
"""
