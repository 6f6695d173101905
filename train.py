"""Train an EAGLE-3 draft model on a hidden-state store.

python train.py hardware=blackwell8 noise=uniform0.05
"""

from eagle3lab.cli import main

if __name__ == "__main__":
    main("train")
