"""Decode prompts with a trained draft and its verifier, and measure how many drafted tokens are accepted.

python evaluate.py draft=outputs/NAME/STAMP/draft prompts=demo
"""

from eagle3lab.cli import main

if __name__ == "__main__":
    main("evaluate")
